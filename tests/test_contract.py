"""The contract that every algorithm keeps, whatever it computes: pure hooks, determinism, one result at any width,
state that survives a checkpoint, bytes counted as sent, and models that can be scored.

Every entry of ALGORITHMS is tested with its defaults or those of `CASES`, and so are some variants, and a user's own.
"""

import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from support import blobs, blueprint, net, on_pictures, reshaped
from torch import Tensor

from rayfed.algorithm import Algorithm, ClientData, Context, Phase, Replies, State
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.common.wrapper import innermost
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD, Adam
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, add, named_tensors, scale, sub, zeros_like
from rayfed.engine import checkpoint
from rayfed.engine.device_data import Part
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Evaluation, Server
from rayfed.experiments.config import build_algorithm
from rayfed.metrics.calibration import Ece
from rayfed.metrics.drift import Drift
from rayfed.metrics.frechet import Frechet
from rayfed.metrics.gradient_norm import GradientNorm

POINTS = ("global", "downloaded", "trained", "adapted")
CLIENTS = range(4)
PEOPLE = blobs(len(CLIENTS), sizes=(11, 16, 21, 26))  # two to five steps an epoch
PICTURES = reshaped(PEOPLE, (1, 2, 3))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(FedAvg):
    """A user's algorithm that uses all of the interface: every stage, two trips, single notes, noise, client state."""

    name: ClassVar[str] = "mine"
    reference: ClassVar[str] = "nobody, 2024"

    @property
    def round_exchanges(self):
        return (self,) * 2

    @property
    def setup_exchanges(self):
        return (self,) * 1

    @property
    def final_exchanges(self):
        return (self,) * 1

    momentum: float = option(0.5, low=0, help="of the server")

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        notes = torch.zeros(len(CLIENTS), 3, device=ctx.task.device)
        return server | {"velocity": zeros_like(server["weights"]), "notes": notes}

    def join(self, ctx: Context) -> State:
        return super().join(ctx) | {"visits": torch.tensor(0)}

    def unicast(self, ctx: Context, server: State) -> State:
        return {"note": server["notes"][ctx.client]}

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return () if ctx.stage == "setup" else (Phase("first", steps=2), ctx.local)

    def start(self, ctx: Context, client: State, down: State) -> State:
        note = down["note"] + 0.1 * torch.randn(3, device=ctx.task.device)  # in `start`, so alike at any width
        return super().start(ctx, client, down) | {"note": note}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        value, output = super().loss(ctx, weights, work, down, batch)
        return value + 0.1 * (output.logits.mean(0) * work["note"]).sum(), output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        logits = [self.predict(ctx, work["weights"], batch.x) for batch in data.train.batches(8)]
        return kept | {"visits": client["visits"] + 1}, up | {"note": torch.cat(logits).mean(0)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        notes = torch.zeros_like(server["notes"])
        for reply in replies.each:
            notes[reply.client] = reply.up["note"]
        if ctx.stage != "round":
            return server | {"notes": notes}
        velocity = add(scale(server["velocity"], self.momentum), sub(replies.mean["weights"], server["weights"]))
        return server | {"notes": notes, "velocity": velocity, "weights": add(server["weights"], velocity)}


@dataclasses.dataclass(frozen=True)
class Case:
    """An algorithm with its options, and what it allows."""

    options: Any = dataclasses.field(default_factory=dict)  # with `name`, or an algorithm
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the blueprint
    sampled: bool = True  # clients may be sampled
    noisy: bool = False  # draws random numbers in `step`, which differ between widths


NO_NORM = {"model": net(batch_norm=False)}
CASES = {name: Case({"name": name}) for name in ALGORITHMS} | {
    "afl": Case({"name": "afl"}, sampled=False),
    "gen_afl": Case({"name": "gen_afl"}, NO_NORM, sampled=False),
    "vm": Case({"name": "vm", "beta": 1.0}, NO_NORM, sampled=False),
    "adcol": Case({"name": "adcol", "hidden": [16]}),
    "dp_adcol": Case({"name": "dp_adcol", "hidden": [16], "server_batch_size": 16}),
    "dp_fedbn": Case({"name": "dp_fedbn", "epsilon": 1e4}),
    "gaussian_dp_fedbn": Case({"name": "gaussian_dp_fedbn", "epsilon": 1e4}),
    "feddebias": Case({"name": "feddebias", "widths": [16, 8]}),
    "vhl": Case({"name": "vhl", "virtual_examples": 40, "virtual_batch_size": 6}),
    "fada": Case({"name": "fada", "target": 1, "hidden": [16]}, sampled=False),
    "faug": Case(
        {
            "name": "faug",
            "seed_examples": 2,
            "generated_examples": 12,
            "generated_batch_size": 3,
            "hidden": 8,
            "server_steps": 5,
        }
    ),
    "group_dro": Case({"name": "group_dro"}),
    "erm": Case({"name": "erm"}, sampled=False),
    "central_group_dro": Case({"name": "central_group_dro"}, sampled=False),
    "mm_rex": Case({"name": "mm_rex"}, NO_NORM, sampled=False),
    "v_rex": Case({"name": "v_rex", "beta": 1.0}, NO_NORM, sampled=False),
    "irm": Case({"name": "irm", "anneal": 1}, sampled=False),
    "fraug": Case({"name": "fraug"}, noisy=True),
    "fedbabu": Case({"name": "fedbabu", "finetune_epochs": 2}),
    "apple": Case({"name": "apple"}, sampled=False),
    "fedgen": Case({"name": "fedgen", "noise": 8, "hidden": 16, "server_steps": 5}, noisy=True),
    "harmofl": Case({"name": "harmofl"}, {"model": on_pictures(net())}),
    # variants
    "mine": Case(Mine(momentum=0.3)),
    "fedavg, moments kept": Case({"name": "fedavg", "keep_optimizer": True}, {"optimizer": SGD(lr=0.05, momentum=0.9)}),
    "fedavg, local statistics": Case({"name": "fedavg"}, {"batch_norm": "local_statistics"}),
    "fedprox, frozen": Case({"name": "fedprox"}, {"batch_norm": "frozen"}),
    "scaffold, momentum": Case({"name": "scaffold"}, {"optimizer": SGD(lr=0.05, momentum=0.9), "batch_norm": "local"}),
    "moon, local": Case({"name": "moon"}, {"batch_norm": "local"}),
    "fedrep, moments kept": Case(
        {"name": "fedrep", "keep_optimizer": True, "head_epochs": 2}, {"optimizer": Adam(lr=0.01, eps=1e-3)}
    ),
    "ditto, moments kept": Case(
        {"name": "ditto", "keep_optimizer": True}, {"optimizer": SGD(lr=0.05, momentum=0.9), "batch_norm": "local"}
    ),
    "vm, local statistics": Case(
        {"name": "vm", "beta": 1.0, "variant": "code"}, {"batch_norm": "local_statistics"}, sampled=False
    ),
    "adcol, cache": Case({"name": "adcol", "hidden": [16], "cache": True}),
    "adcol, fixed size": Case({"name": "adcol", "hidden": [16], "fixed_size": True}),
    "adcol, more discriminators": Case(
        {"name": "adcol", "hidden": [16], "discriminators": 3, "share_predictor": True, "mu": 0.5}
    ),
    "dp_adcol, curious": Case({"name": "dp_adcol", "setting": "curious", "sampling": 0.4, "guarantee": "strict"}),
    "adcol, a share": Case({"name": "adcol", "hidden": [16], "sampling": 0.4}),
    "feddebias, once": Case({"name": "feddebias", "widths": [16, 8], "transfer": "once"}),
    "fedproto, models shared": Case({"name": "fedproto", "share_model": True, "count_weighted": True}),
    "partialfed, adaptive": Case({"name": "partialfed", "variant": "adaptive"}, noisy=True),
    "fraug, plain noise": Case({"name": "fraug", "augmenter": "laplace"}, noisy=True),
    "dbe over fedgen": Case(
        {
            "name": "dbe",
            "base": {"name": "fedgen", "noise": 8, "hidden": 16, "server_steps": 5},
            "kappa": 1.0,
        },
        noisy=True,
    ),
    "feddebias, mixture": Case(
        {"name": "feddebias", "widths": [16, 8], "pseudo": "mixture", "proxy": "noise", "pseudo_samples": 7}
    ),
    "feddebias, mixture of none, once": Case(
        {"name": "feddebias", "widths": [9], "pseudo": "mixture", "proxy": "noise", "k_mix": 0, "transfer": "once"}
    ),
    "feddebias, projector inside": Case({"name": "feddebias", "widths": [16, 8], "projector_in_extractor": True}),
    "mixup over feddebias": Case({"name": "mixup", "base": {"name": "feddebias", "widths": [16, 8]}}),
    "mixup over scaffold": Case({"name": "mixup", "base": "scaffold"}, {"batch_norm": "local"}),
    "moon, with a head": Case({"name": "moon", "widths": [8, 4]}),
    "feddebias, moments kept": Case(
        {"name": "feddebias", "widths": [16, 8], "keep_optimizer": True}, {"optimizer": SGD(lr=0.05, momentum=0.9)}
    ),
    "dbe over fedmix": Case({"name": "dbe", "base": "fedmix", "kappa": 1.0}),
    "dbe over scaffold": Case({"name": "dbe", "base": "scaffold", "mu": 0.5}),
    "dbe over moon": Case({"name": "dbe", "base": "moon", "kappa": 1.0}),
    "dbe over fedrep": Case({"name": "dbe", "base": "fedrep", "kappa": 1.0}),
    "dbe over ditto": Case({"name": "dbe", "base": "ditto", "kappa": 1.0}),
    **{
        f"mr over {base}": Case({"name": "dbe", "base": base, "kappa": 1.0, "prbm": False})
        for base in ("ditto", "fedper", "fedrep", "fedrod", "fedbabu", "apfl", "fedfomo")
    },
    "fedrod, moments kept": Case(
        {"name": "fedrod", "keep_optimizer": True}, {"optimizer": SGD(lr=0.05, momentum=0.9), "batch_norm": "local"}
    ),
    "apfl, paper": Case({"name": "apfl", "variant": "paper", "keep_optimizer": True}, {"batch_norm": "local"}),
    "pfedme, local": Case({"name": "pfedme", "beta": 2.0, "lam": 5.0}, {"batch_norm": "local"}),
    "per_fedavg, hf": Case({"name": "per_fedavg", "variant": "hf", "beta": 0.02}, {"batch_size": 3}),
    "fedfomo, two models": Case({"name": "fedfomo", "models": 2}, {"batch_norm": "local_statistics"}),
    "apple, local": Case({"name": "apple", "relation_lr": 0.01}, {"batch_norm": "local"}, sampled=False),
    "feddyn, local": Case({"name": "feddyn", "alpha": 0.1}, {"batch_norm": "local"}),
}
EVERY = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
ENTRIES = pytest.mark.parametrize("entry", ALGORITHMS)


def algorithm_of(case: Case) -> Algorithm:
    return case.options if isinstance(case.options, Algorithm) else build_algorithm(case.options, where="algorithm")


def plan_of(case: Case, *, algorithm: Algorithm | None = None, **changes: Any):
    algorithm = algorithm or algorithm_of(case)
    return blueprint(algorithm, people_of(algorithm), **(case.changes | changes))


def people_of(algorithm: Algorithm):
    return PICTURES if innermost(algorithm).name == "harmofl" else PEOPLE


def server_of(plan, points: Sequence[str] = (), **evaluation: Any) -> Server:
    people = people_of(plan.algorithm)
    plan.check(people)
    return Server(plan, people, LocalFleet(plan, people), Evaluation(points=tuple(points), **evaluation))


def finished(plan) -> Server:
    server = server_of(plan)
    list(server.run())
    return server


def everything(server: Server) -> dict[str, Any]:
    return {"server": server.state, "clients": server.fleet.save()}


def assert_finite(server: Server) -> None:
    for path, tensor in named_tensors(everything(server)):
        assert bool(torch.isfinite(tensor.double()).all()), path


# Purity


def facts(value: Any) -> Any:
    """All that can change about a value, as plain data: the bits of every tensor, keys, lengths and the rest."""
    if isinstance(value, Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().contiguous().reshape(-1).numpy().tobytes()
    if isinstance(value, dict):
        return {key: facts(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [facts(item) for item in value]
    if isinstance(value, Part):
        return facts({"x": value.x, "y": value.y})
    if isinstance(value, Task):
        networks = [value.model, *value.modules.values()]
        held = [[*n.module.parameters(), *n.module.buffers()] for n in networks]
        return facts(
            [value.initial_weights(), held, sorted(value.personal_names), value.trainable, sorted(value.modules)]
        )
    if isinstance(value, Algorithm):
        return {key: facts(item) for key, item in vars(value).items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: facts(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return repr(value)


HOOKS = (
    *("check", "modules", "adapt", "init", "broadcast", "unicast", "weight", "weights", "aggregate", "join", "phases"),
    *("start", "prepare", "step", "finish", "global_model", "downloaded_model", "trained_model", "predict"),
)


class Impure(AssertionError):
    """A hook left a trace."""


def intercepted(algorithm: Algorithm, around: Any) -> Algorithm:
    """A copy of `algorithm` whose hooks are called as around(name, hook, self, *args)."""

    def wrap(name: str) -> Any:
        original = getattr(type(algorithm), name)
        return lambda self, *args, **kwargs: around(name, original, self, *args, **kwargs)

    kind = type("Intercepted", (type(algorithm),), {name: wrap(name) for name in HOOKS})
    copied = object.__new__(kind)
    vars(copied).update(vars(algorithm))
    return copied


def pure(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
    lent = [arg for k, arg in enumerate(args) if not (name in ("step", "finish") and k == 1)]  # `work` is its own
    before = facts([self, *lent, kwargs])
    result = hook(self, *args, **kwargs)
    after = facts([self, *lent, kwargs])
    changed = [k for k, (was, now) in enumerate(zip(before, after, strict=True)) if was != now]
    if changed:
        raise Impure(
            f"{name} changed {['the algorithm' if k == 0 else f'argument {k} of those lent' for k in changed]}"
        )
    return result


@EVERY
def test_hooks_change_nothing_that_they_are_lent(case):
    algorithm = algorithm_of(case)
    plan = plan_of(case, algorithm=intercepted(algorithm, pure))
    server = server_of(plan, points=scored_points(case))
    kinds = {kind: set(vars(kind)) for kind in type(algorithm).__mro__}
    list(server.run())
    assert {kind: set(vars(kind)) for kind in kinds} == kinds  # nothing cached on the class, either


def careless(hook: str) -> type[FedAvg]:
    """FedAvg with one impurity, of the kind that torch's counters of in-place changes do not see."""

    class Careless(FedAvg):
        def aggregate(self, ctx, server, replies):
            if hook == "server":
                server["weights"]["fc.bias"].data.add_(1)
            if hook == "replies":
                replies.mean["weights"]["fc.bias"].data.add_(1)
            if hook == "keys":
                server["more"] = torch.zeros(1)
            return super().aggregate(ctx, server, replies)

        def step(self, ctx, work, down, batch):
            if hook == "batch":
                batch.x.data.mul_(2)
            if hook == "attribute":
                object.__setattr__(self, "seen", True)
            if hook == "template":
                next(ctx.task.model.module.parameters()).data.add_(1)
            return super().step(ctx, work, down, batch)

        def finish(self, ctx, work, client, down, data):
            if hook == "data":
                data.train.y.data.zero_()
            if hook == "down":
                down["weights"]["fc.bias"].data.add_(1)
            return super().finish(ctx, work, client, down, data)

        def start(self, ctx, client, down):
            if hook == "initial":
                ctx.task.initial_weights()["fc.bias"].data.add_(1)
            return super().start(ctx, client, down)

    return Careless


@pytest.mark.parametrize(
    ("hook", "caught"),
    [
        *(("server", "aggregate"), ("replies", "aggregate"), ("keys", "aggregate"), ("batch", "step")),
        *(("attribute", "step"), ("template", "step"), ("data", "finish"), ("down", "finish"), ("initial", "start")),
    ],
)
def test_the_watch_catches_what_it_should(hook, caught):
    with pytest.raises(Impure, match=f"^{caught} changed"):
        finished(plan_of(CASES["fedavg"], algorithm=intercepted(careless(hook)(), pure)))


# Results


@EVERY
def test_equal_seeds_give_equal_bits_and_others_do_not(case):
    first, again, other = (finished(plan_of(case, seed=seed)).state_hash() for seed in (3, 3, 4))
    assert first == again
    assert first != other


@EVERY
def test_any_width_gives_the_same_result(case):
    alone, together = (
        everything(finished(plan_of(case, vmap_clients=w))) for w in (1, 3)
    )  # a block of three and one of one
    for (path, a), (other, b) in zip(named_tensors(alone), named_tensors(together), strict=True):
        assert (path, a.dtype, a.shape) == (other, b.dtype, b.shape)
        assert bool(torch.isfinite(b.double()).all()), path
        if not case.noisy:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=2e-5, msg=lambda m, path=path: f"{path}: {m}")


def saved_after_two(plan) -> tuple[str, str, bytes]:
    """Fingerprints after four rounds and after two, and the checkpoint after two."""
    server = server_of(plan)
    next(record for record in server.run() if record.stage == "round" and record.round == 2)
    return finished(plan).state_hash(), server.state_hash(), checkpoint.dump(server)


@pytest.mark.parametrize(
    ("case", "cohort"),
    [
        pytest.param(case, cohort, id=f"{name}, {cohort} a round")
        for name, case in CASES.items()
        for cohort in ((2, 4) if case.sampled else (4,))
    ],
)
def test_state_survives_save_and_load(case, cohort):
    plan = plan_of(case, rounds=4, cohort=cohort)
    whole, half, saved = saved_after_two(plan)
    content = torch.load(io.BytesIO(saved), weights_only=True)
    resumed = server_of(plan)
    resumed.state, resumed.round = content["server"], content["round"]
    resumed.fleet.load(content["clients"])
    assert resumed.round == 2
    assert resumed.state_hash() == half != whole
    list(resumed.run())
    assert resumed.state_hash() == whole


@EVERY
def test_the_engines_checkpoints_can_be_resumed(case):
    plan = plan_of(case, rounds=4)
    whole, half, saved = saved_after_two(plan)
    resumed = server_of(plan)
    checkpoint.load(resumed, io.BytesIO(saved), "saved")
    assert resumed.state_hash() == half
    list(resumed.run())
    assert resumed.state_hash() == whole


@EVERY
def test_what_is_watched_is_recorded_after_each_round(case):
    server = server_of(plan_of(case))
    names = set(server.algorithm.logged_scalars)
    for record in server.run():
        found = [s for s in record.scores if s.client == -1 and s.metric in names]
        assert {s.metric for s in found} == (names if record.stage == "round" else set())
        assert all(s[:4] == (-1, "", "train", "global") and s.n == sum(server.examples) for s in found)
        assert all(s.value == float(server.state[s.metric]) for s in found)


@EVERY
def test_clients_that_are_not_asked_keep_their_state(case):
    if not case.sampled:
        with pytest.raises(UsageError, match=r"^(cohort=2|algorithm\.name=\w+): "):
            plan_of(case, cohort=2).check(PEOPLE)
        return
    server = server_of(plan_of(case, rounds=4, cohort=2))
    before = facts(server.fleet.save())
    for record in server.run():
        after = facts(server.fleet.save())
        if record.stage == "round":
            asleep = set(before) - set(server.sample(record.round))
            assert all(after[i] == before[i] for i in asleep)
        before = after
    assert_finite(server)


@EVERY
@pytest.mark.parametrize("width", [1, 3])
def test_bytes_counted_are_bytes_sent(case, width):
    up: dict[str, int] = {}
    down: dict[str, int] = {}

    def count(total: dict[str, int], payload: State, times: int = 1) -> None:
        for field, tree in payload.items():
            size = sum(t.numel() * t.element_size() for _, t in named_tensors(tree))
            if size:
                total[field] = total.get(field, 0) + size * times

    def spy(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if name == "finish":
            count(up, result[1])
        if name == "broadcast":
            count(down, result, len(args[0].cohort))
        if name == "unicast":
            count(down, result)
        return result

    algorithm = algorithm_of(case)
    changes = {"cohort": 2} if case.sampled else {}
    plan = plan_of(case, algorithm=intercepted(algorithm, spy), vmap_clients=width, rounds=3, **changes)
    records = []
    for record in server_of(plan).run():
        assert record.bytes_up == up
        assert record.bytes_down == down
        records.append(dict(up))
        up.clear()
        down.clear()
    assert any(records) == (algorithm.name != "solo")


def scored_points(case: Case) -> list[str]:
    """The points at which there is a model: all, or all but the global one."""
    server = server_of(plan_of(case))
    algorithm = server.algorithm
    return list(POINTS if algorithm.global_model(server.ctx, server.state) is not None else POINTS[1:])


@EVERY
def test_every_point_can_be_scored(case):
    algorithm, points = algorithm_of(case), scored_points(case)
    shapes = set()

    def spy(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
        result = hook(self, *args, **kwargs)
        if name == "predict":
            shapes.add((result.shape[0] == len(args[2]), tuple(result.shape[1:]), result.requires_grad))
        return result

    record = list(server_of(plan_of(case, algorithm=intercepted(algorithm, spy)), points=points).run())[-1]
    if record.stage == "final":  # scores what is downloaded after it; the last round has the rest
        points = [point for point in points if point != "trained"]
    assert shapes == {(True, (3,), False)}
    found = {(s.point, s.client, s.split, s.metric): s for s in record.scores if s.split != "train"}
    wanted = {
        (p, i, split, m) for p in points for i in CLIENTS for split in ("val", "test") for m in ("accuracy", "loss")
    }
    assert set(found) == wanted
    assert all(0 <= s.value <= 1 for s in found.values() if s.metric == "accuracy")
    assert all(0 <= s.value < 100 for s in found.values())
    assert algorithm.default_eval_point in POINTS
    if not case.changes.get("batch_norm"):  # a policy may take the global model away
        assert algorithm.default_eval_point in scored_points(case)


@EVERY
@pytest.mark.parametrize(
    ("optimizer", "width"),
    [
        (SGD(lr=0.02, momentum=0.9, weight_decay=0.01, nesterov=True), 1),
        (Adam(lr=0.005, weight_decay=0.01), 4),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else str(value),
)
def test_momentum_and_adam_work(case, optimizer, width):
    server = server_of(plan_of(case, optimizer=optimizer, vmap_clients=width))
    start = server.state_hash()
    list(server.run())
    assert_finite(server)
    assert server.state_hash() != start


# Metrics


@EVERY
def test_every_kind_of_metric_can_be_taken_and_changes_nothing(case):
    """Of predictions and representations at every point, of training, and of gradients at global weights."""
    points = scored_points(case)
    metrics = {"ece": Ece(), "frechet": Frechet(layers=["features", "logits"]), "drift": Drift()}
    plan = plan_of(case, rounds=1)
    _, whole = plan.global_model(people_of(plan.algorithm))
    if whole:
        metrics["gradient_norm"] = GradientNorm(splits=["val"])
    server = server_of(plan, points, metrics=metrics)
    found = {(score.point, score.metric) for record in server.run() for score in record.scores}
    of_models = ("ece", "frechet", "frechet_mean", "frechet@logits", "frechet_mean@logits")
    wanted = {(p, metric) for p in points for metric in of_models} | {("trained", "drift")}
    if whole:
        wanted |= {("global", "gradient_norm"), ("global", "gradient_norm_mean")}
    assert wanted <= found
    assert facts(server.state) == facts(finished(plan).state)


# Newcomers


@EVERY
def test_unseens_change_nothing_and_are_scored_in_the_end(case):
    """One client more that takes no part: training ends with the same bits as without it; then it joins."""
    algorithm = algorithm_of(case)
    people = people_of(algorithm)
    fewer = dataclasses.replace(people, clients=people.clients[:3])
    plan = blueprint(algorithm, fewer, **case.changes)
    with_one = dataclasses.replace(people, unseen_clients=1)
    if algorithm.refuses_unseen_clients:
        with pytest.raises(
            UsageError, match=rf"^unseen_clients=1: algorithm\.name={algorithm.name} .*; use unseen_clients=0$"
        ):
            plan.check(with_one)
        return
    plan.check(with_one)
    servers, last = [], []
    for population in (fewer, with_one):
        server = Server(plan, population, LocalFleet(plan, population), Evaluation(points=("downloaded",)))
        servers.append(server)
        last.append(list(server.run())[-1].scores)
    states = [server.fleet.save() for server in servers]
    assert set(states[1]) == {*states[0], 3}
    assert facts([servers[1].state, {i: states[1][i] for i in states[0]}]) == facts([servers[0].state, states[0]])
    assert [score for score in last[1] if not score.unseen] == last[0]
    found = {(s.client, s.point, s.split, s.metric): s.value for s in last[1] if s.unseen}
    pairs = [(p, split) for p in ("downloaded", "adapted") for split in ("val", "test")]
    assert set(found) == {(3, p, split, m) for p, split in pairs for m in ("accuracy", "loss")}
    adapted = found[3, "adapted", "test", "loss"]
    assert 0 <= adapted < 100
    assert adapted != found[3, "downloaded", "test", "loss"]


# What is said


@ENTRIES
def test_every_algorithm_says_what_it_is(entry):
    kind = type(build_algorithm({"name": entry}, where="algorithm"))
    assert kind.name == entry
    assert kind.reference
    text = sys.modules[kind.__module__].__doc__ or ""
    assert re.search(r"\b20[12]\d\b", text), "the module's text names the paper with its year"
    assert len(text.splitlines()) > 3
    assert kind.__dataclass_params__.frozen
    for field in dataclasses.fields(kind):
        assert field.kw_only, field.name
        assert len(field.metadata.get("help", "")) > 3 or not field.init, field.name


def test_no_two_entries_are_one_class():
    assert len(set(ALGORITHMS.values())) == len(ALGORITHMS)
