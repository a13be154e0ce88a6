"""Runs everything that a host or server computes on the stand-in device; prints the outcome of each case as JSON.

A program of its own, because torch counts its devices at the first backward pass of a process.
"""

import itertools
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from helpers import stand_in_device
from rayfed.experiments.checks import check_trial

FINE = "as on the CPU"


def outcome(computed: Callable[[Any], Any]) -> str:
    """What came of `computed(device)`, which returns tensors in a tree: fine, or in one line what was wrong."""
    from rayfed.core.trees import named_tensors

    wanted = dict(named_tensors(computed("cpu")))
    try:
        with stand_in_device.stand_in_device() as device:
            found = {path: tensor.detach().cpu() for path, tensor in named_tensors(computed(device))}
    except Exception as error:  # whatever it is, it belongs into the report
        frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).parent.name != "helpers"]
        place = next((f for f in reversed(frames) if "/rayfed/" in f.filename), None)
        line = str(error).splitlines()[0] if str(error) else ""
        return f"{type(error).__name__}: {line}" + (f" [{place.name}: {place.line}]" if place else "")
    if set(found) != set(wanted):
        return f"other tensors: {sorted(set(found) ^ set(wanted))}"
    for path, tensor in found.items():
        try:
            torch.testing.assert_close(tensor, wanted[path], rtol=1e-4, atol=1e-6)
        except AssertionError as error:
            return f"{path}: {error}"
    return FINE


def algorithms(width: int, *, variants: bool = True, **changes: Any) -> dict[str, Callable[[Any], Any]]:
    """Two rounds of every case of the contract, then scores at all points where `width` is 1.

    Without `variants` there is one case of each algorithm. `changes` are those of all blueprints.
    An operation on the stand-in device takes a hundred times that of the CPU, so there are few clients of few batches.
    """
    from helpers import algorithm_cases as contract
    from helpers.federations import blobs, blueprint, reshaped
    from rayfed.algorithms import ALGORITHMS
    from rayfed.engine.host import LocalFleet
    from rayfed.engine.server import Evaluation, Server

    class DrawsOnCpu(Server):
        """Its hooks draw from the CPU's stream wherever they compute, so that its place does not change results."""

        def __init__(self, *given: Any):
            stand_in_device.drawn.clear()
            super().__init__(*given)
            assert not stand_in_device.drawn, f"init draws on the device: {stand_in_device.drawn}"

        def _aggregated(self, *given: Any) -> Any:
            stand_in_device.drawn.clear()
            state = super()._aggregated(*given)
            assert not stand_in_device.drawn, f"aggregate draws on the device: {stand_in_device.drawn}"
            return state

    few = blobs(width + 1, sizes=(11, 16))  # two and three batches; with `width` 3, a block of three and one alone

    def run(case: Any, device: Any) -> Any:
        algorithm = contract.algorithm_of(case)
        people = few if contract.people_of(algorithm) is contract.PEOPLE else reshaped(few, contract.PICTURES.shape)
        plan = blueprint(algorithm, people, vmap_clients=width, **case.changes, **changes)
        check_trial(plan, people)
        points = contract.POINTS if plan.global_model(people)[0] is not None else contract.POINTS[1:]
        evaluation = Evaluation(every=2, points=points if width == 1 else ())
        server = DrawsOnCpu(plan, people, LocalFleet(plan, people, device), evaluation, device)
        with no_step_waits():
            for _ in server.run():
                unpacked(server, torch.device(device))
        return contract.everything(server)

    return {
        name: lambda device, case=case: run(case, device)
        for name, case in contract.CASES.items()
        if (width == 1 or not case.noisy) and (variants or name in ALGORITHMS)
    }


def unpacked(server: Any, device: torch.device) -> None:
    """Move all states to `device`, as after a message or a checkpoint."""
    from rayfed.core.trees import tree_map

    server.state = tree_map(lambda value: value.to(device), server.state)
    states = {client: server.fleet.states[client] for client in server.fleet.states}
    server.fleet.load((client, tree_map(lambda value: value.to(device), state)) for client, state in states.items())


@contextmanager
def no_step_waits() -> Iterator[None]:
    """Let local training fail if a step, or taking its batches, would wait for a GPU."""
    from rayfed.engine import training

    def watched(batches: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def watch(*given: Any) -> Iterator[Any]:
            stand_in_device.waited.clear()
            yield from batches(*given)  # a step is taken after each
            assert not stand_in_device.waited, f"training waits for the device: {stand_in_device.waited}"

        return watch

    alone, of_all = watched(training._batches), watched(training.Pool.batches)
    with mock.patch.object(training, "_batches", alone), mock.patch.object(training.Pool, "batches", of_all):
        yield


def models() -> dict[str, Callable[[Any], Any]]:
    """A forward and a backward pass of every network of ours, and of torchvision's that a paper uses."""
    import torch.nn.functional as F

    from rayfed.models import MODELS
    from rayfed.models.base import build_model

    torch.use_deterministic_algorithms(True)
    others = {"vgg11", "resnet34", "resnet50", "torchvision", "huggingface"}

    def run(name: str, device: Any) -> Any:
        shape = {"fasttext": (5,), "har_cnn": (1, 1, 32)}.get(name, (1, 32, 32))
        torch.manual_seed(0)
        model = build_model(name, {}, shape, 10).to(device)
        x = torch.randint(0, 9, (4, *shape)) if name == "fasttext" else torch.randn(4, *shape)
        logits = model(x.to(device))
        F.cross_entropy(logits.reshape(4, 10, -1).mean(2), torch.arange(4, device=device)).backward()
        return {"logits": logits, "gradients": {n: p.grad for n, p in model.named_parameters() if p.grad is not None}}

    return {name: lambda device, name=name: run(name, device) for name in sorted(set(MODELS) - others)}


def careless() -> dict[str, Callable[[Any], Any]]:
    """What has to be found: code that forgets the device, in the two ways in which it can."""
    from helpers.federations import blobs, blueprint
    from rayfed.algorithms.fedavg import FedAvg
    from rayfed.engine.host import LocalFleet
    from rayfed.engine.server import Evaluation, Server

    def run(device: Any, change: Callable[[Any, Any, Any], Any]) -> Any:
        class Changed(FedAvg):
            def loss(self, ctx: Any, weights: Any, work: Any, down: Any, batch: Any) -> Any:
                value, output = super().loss(ctx, weights, work, down, batch)
                return change(value, output, batch), output

        people = blobs()
        plan = blueprint(Changed(), people)
        server = Server(plan, people, LocalFleet(plan, people, device), Evaluation(points=()), device)
        with no_step_waits():
            list(server.run())
        return server.state

    changes: dict[str, Callable[[Any, Any, Any], Any]] = {
        "adds a tensor of the CPU": lambda value, output, batch: value + (output.logits * torch.ones(3)).mean(),
        "reads as numpy": lambda value, output, batch: value + len(batch.y.numpy()),
        "copies a number": lambda value, output, batch: value * torch.tensor(1.0, device=value.device),
        "is careful": lambda value, output, batch: value,
    }
    return {name: lambda device, change=change: run(device, change) for name, change in changes.items()}


METRICS = {
    **dict.fromkeys(("ece", "class_accuracy", "drift", "gradient_norm", "frechet"), True),
    "mdl": {"steps": 5, "sizes": 2, "seeds": 1, "hidden": 4, "examples": 60, "layers": ["features", "logits"]},
    "head_accuracy": {"fit": ["val"]},
    "tsne": {"examples": 40, "perplexity": 5},
}


def simulations(folder: Path) -> dict[str, Callable[[Any], Any]]:
    """Whole simulations by `rayfed.run`: all metrics, a resumed run, streamed data, every augmentation and model."""
    import rayfed
    from rayfed.augment import AUGMENTS
    from rayfed.experiments import simulation

    def run(device: Any, *, rounds: int = 1, given: Mapping[str, Any] | None = None, **changes: Any) -> Any:
        with no_step_waits(), mock.patch.object(simulation, "device_for", return_value=torch.device(device)) as chosen:
            result = rayfed.run(
                {
                    "data.name": "mini_digits",
                    "data.per_domain": 40,
                    **({} if given else {"model.name": "mlp"}),
                    "local": {"steps": 2, "batch_size": 8, "lr": 0.01},
                    "rounds": rounds,
                    "results": str(folder / torch.device(device).type),
                    **changes,
                },
                **(given or {}),
            )
        assert chosen.called, "the run did not ask for its device"
        values = result.metrics.sort_values([*result.metrics.columns[:-1]])["value"]
        return {"server": result.server, "clients": dict(result.clients), "values": torch.tensor(values.to_numpy())}

    def given_there(device: Any) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(2352, 10)).to(device)
        loss = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 1.5, 10))
        return run(device, given={"model": model, "loss": loss})

    def resumed(device: Any) -> Any:
        run(device, rounds=1, experiment="resumed")
        return run(device, rounds=2, experiment="resumed", resume=True)

    cases: dict[str, Callable[[Any], Any]] = {
        "metrics": lambda device: run(device, metrics=METRICS, **{"evaluate.points": ["global", "trained"]}),
        "resumed": resumed,
        "a model on the device and a loss with weights": given_there,
        "streamed": lambda device: run(device, **{"placement.data_on_device": False}),
        "states on disk": lambda device: run(device, rounds=2, **{"algorithm.name": "scaffold", "state.memory": 1e-5}),
        "unseen": lambda device: run(device, unseen_clients=1),
        "domain left out": lambda device: run(device, leave_out="street"),
    }
    for name, width in itertools.product(AUGMENTS, (1, 3)):
        changes = {"augment.name": name, "placement.vmap_clients": width}
        cases[f"augmented by {name}, {width} at once"] = lambda device, changes=changes: run(device, **changes)
    return cases


def main(*groups: str) -> None:
    stand_in_device.register()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            "algorithms": lambda: algorithms(1, variants=False, deterministic=True),
            "algorithms and variants": lambda: algorithms(1, deterministic=True),
            "algorithms, 3 at once": lambda: algorithms(3, deterministic=True),
            "simulations": lambda: simulations(Path(folder)),
            "models": models,
            "careless": careless,
        }
        outcomes = {group: {name: outcome(computed) for name, computed in cases[group]().items()} for group in groups}
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
