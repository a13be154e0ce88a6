"""Check and time rayfed on one GPU: what works, whether it agrees with the CPU and with itself, and what a step costs.

Prints one table and writes it as JSON. Each section runs in a process of its own, within a time limit, so that what
fails or hangs in one is a row of the table and the others go on. Ray is used where it is installed. The limits of
all sections add up to less than ten minutes. The exit status is 1 if anything failed.

The cases of the contract are those of the tests, so this needs a checkout.
"""

import argparse
import contextlib
import dataclasses
import gc
import importlib.util
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from _bare import BareWorker, largest_difference, state_of
from peers import jobs
from step_cost import NETWORKS, exchange, job, plain

import rayfed
from rayfed.algorithm import Algorithm, Context, State, Stepped
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.personal_heads import FedRep
from rayfed.core.errors import breaks_device, error_line
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.lr_schedule import CONSTANT, Exponential, LrSchedule
from rayfed.core.optim import SGD, Adam
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, named_tensors
from rayfed.data.population import Client, ClientTable, Examples, Population
from rayfed.engine import graphs, host
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import device_for, set_kernels
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.fleet import ScoreRequest
from rayfed.engine.host import LocalFleet
from rayfed.engine.purity import ImpureHook
from rayfed.engine.server import Server
from rayfed.experiments import simulation

sys.path.append(str(Path(__file__).parents[1] / "tests"))

TOLERANCE = 1e-3  # of a tensor's largest value: rounding of float32, magnified by a few steps
OPTIMIZERS = {"SGD": SGD(lr=0.005), "Adam": Adam(lr=0.001)}
Values = dict[str, Any]


class Row(NamedTuple):
    """A row of the table: what was tried, and what came of it by name; `failed` is a name, too."""

    what: str
    values: Values


class Check(NamedTuple):
    """What a section is given."""

    device: torch.device
    rounds: int  # timed, after one that warms up
    tiny: bool
    end: float  # of the section, in time.monotonic

    @property
    def steps(self) -> int:
        """The steps of a client of which the cost is measured."""
        return 2 if self.tiny else 10

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    def part(self, share: float) -> "Check":
        """Return the check with this share of the time that is left."""
        return self._replace(end=self.end - (1 - share) * (self.end - time.monotonic()))

    def row(self, what: str, measure: Callable[[], Values]) -> Row:
        """Return what `measure` returns, or how it failed; an error that breaks the device ends the section."""
        if self.is_over:
            return Row(what, {"failed": "no time left"})
        try:
            return Row(what, measure())
        except Exception as error:
            if breaks_device(error):
                raise
            return Row(what, {"failed": error_line(error)})

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds that `work` takes, until the device has finished."""
        self.synchronize()
        began = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - began

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


# Sections: each yields its rows one by one


def smoke(check: Check) -> Iterator[Row]:
    """Whole runs through `rayfed.run`, compared with the CPU."""
    yield check.row("device", lambda: _describe(check.device))
    with _runs(check) as run:

        def compared(name: str, **changes: Any) -> Values:
            changes |= {"experiment": name}
            here = run(**changes)
            on_cpu = {"experiment": f"{name}, CPU", "placement.hosts": 0, "placement.gpus": 0}
            there = run(on_device=False, **changes | on_cpu)
            return _compared(here.server, there.server)

        def resumed() -> Values:
            run(rounds=1, experiment="resumed")
            again = run(rounds=2, experiment="resumed", resume=True)
            return _compared(again.server, run(experiment="whole").server)

        yield check.row("run", lambda: compared("run"))
        yield check.row("cosine schedule", lambda: compared("cosine", **{"lr_schedule.name": "cosine"}))
        yield check.row("streamed data", lambda: compared("streamed", **{"placement.data_on_device": False}))
        yield check.row("resumed from a checkpoint", resumed)
        tiny_memory = {"algorithm.name": "scaffold", "state.memory": 1e-5}
        with mock.patch.object(host, "room_for_states", return_value=0):  # a large GPU would keep all of them
            yield check.row("states on disk", lambda: compared("spilled", **tiny_memory))
        if check.device.type == "cuda" and importlib.util.find_spec("ray"):
            hosts = {"placement.hosts": 2, "placement.gpus": 0.5}
            yield check.row("two Ray hosts on the GPU", lambda: compared("hosts", **hosts))


@contextlib.contextmanager
def _runs(check: Check) -> Iterator[Callable[..., rayfed.Result]]:
    """Yield a function that runs a small experiment on the device, or on the CPU."""
    with tempfile.TemporaryDirectory() as folder:

        def run(*, on_device: bool = True, **changes: Any) -> rayfed.Result:
            values = {"model.name": "mlp" if check.tiny else "cnn", "rounds": 2, "local.steps": 3, "results": folder}
            gpus = 1 if on_device and check.device.type == "cuda" else 0
            values |= {"placement.gpus": gpus} | changes
            if not on_device or gpus:
                return rayfed.run(values, quiet=True)
            with mock.patch.object(simulation, "device_for", return_value=check.device):  # a run cannot ask for it
                return rayfed.run(values, quiet=True)

        yield run


def _describe(device: torch.device) -> Values:
    torch.zeros(1, device=device)
    values = {"torch": torch.__version__, "rayfed": rayfed.__version__, "cpus": os.cpu_count()}
    if device.type != "cuda":
        return values | {"name": str(device)}
    free, total = torch.cuda.mem_get_info()  # of all processes: the context is right on a GPU that nobody else uses
    context = total - free - torch.cuda.memory_reserved()
    cuda = {"name": torch.cuda.get_device_name(), "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}
    return values | cuda | {"GB": total / 1e9, "context_MB": context / 1e6}


def correctness(check: Check) -> Iterator[Row]:
    """Every case of the contract, with states moved to the device between rounds, against the CPU."""
    for width, share in ((1, 0.5), (3, 0.6)):
        yield from _of_cases(check.part(share), f"{width} at once", partial(_beside_cpu, check.device), width)


def replays(check: Check) -> Iterator[Row]:
    """Steps replayed from CUDA graphs against the steps themselves, to the bit: networks, and every case."""
    networks = ["mlp"] if check.tiny else list(NETWORKS)
    for network, (name, optimizer), width in itertools.product(networks, OPTIMIZERS.items(), (1, 4)):
        changes = {"optimizer": optimizer, "vmap_clients": width, "rounds": 3, "deterministic": True}
        given = job(network, 20, 4, **changes)
        yield check.row(f"{network}, {name}, K={width}", partial(_graphs_beside_steps, check.device, *given))
    yield check.row("a rate that falls", partial(_falling_rate, check.device, networks[-1]))
    yield check.row("a step that ends in .item()", partial(_waiting_step, check.device, networks[-1]))
    yield check.row("a step that counts its calls", partial(_counting_step, check.device, networks[-1]))
    yield check.row("a global variable that changes", partial(_global_variable, check.device, networks[0]))
    for width, share in ((1, 0.5), (3, 1.0)):
        compare = partial(_case_with_graphs, check.device)
        yield from _of_cases(check.part(share), f"{width} at once", compare, width, variants=False)


def _falling_rate(device: torch.device, network: str) -> Values:
    """Compare steps that read the rate from a tensor with those without graphs, which may differ in the last bits."""
    plan, people = job(network, 20, 4, rounds=4, deterministic=True, schedule=Exponential(decay=0.5))
    return _graphs_beside_steps(device, plan, people, TOLERANCE)


@dataclasses.dataclass(frozen=True)
class _EndsInItem(FedAvg):
    """FedAvg whose step waits for its loss, when all of its kernels were launched."""

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        work, metrics = super().step(ctx, work, down, batch)
        metrics["loss"].item()
        return work, metrics


def _waiting_step(device: torch.device, network: str) -> Values:
    plan, people = job(network, 30, 4, rounds=2, deterministic=True, algorithm=_EndsInItem())
    return _graphs_beside_steps(device, plan, people)


@dataclasses.dataclass(frozen=True)
class _Counts(FedAvg):
    """FedAvg that divides gradients by the number of its calls, which is an attribute."""

    calls: list[int] = dataclasses.field(default_factory=lambda: [0])

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        self.calls[0] += 1
        return {name: grad / self.calls[0] for name, grad in grads.items()}


def _counting_step(device: torch.device, network: str) -> Values:
    plan, people = job(network, 30, 4, rounds=2, deterministic=True)
    states, fleets = [], []
    for with_graphs in (True, False):
        changed = dataclasses.replace(plan, algorithm=_Counts(), cuda_graphs=with_graphs)
        state, fleet = _run(changed, people, device)
        states.append(state)
        fleets.append(fleet)
    counts = fleets[0].host.graphs.counts if fleets[0].host.graphs else Counter[str]()
    if counts[graphs.REPLAYED]:
        return {"failed": f"{counts[graphs.REPLAYED]} steps were replayed"}
    return _compared(states[0], states[1], tolerance=0) | {"not_used": "; ".join(sorted(counts)) or "no CUDA device"}


_FACTOR = [1.0]


@dataclasses.dataclass(frozen=True)
class _Global(FedAvg):
    """FedAvg that multiplies gradients by a global variable."""

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        return {name: grad * _FACTOR[0] for name, grad in grads.items()}


def _global_variable(device: torch.device, network: str) -> Values:
    """Change a global variable between two rounds: the run must end with a line, unless nothing was replayed."""
    plan, people = job(network, 30, 4, rounds=4, deterministic=True, algorithm=_Global())
    fleet = LocalFleet(plan, people, device)
    run = Server(plan, people, fleet, Evaluation(points=()), device).run()
    _FACTOR[0] = 1.0
    try:
        for _ in range(plan.rounds):
            next(run)
            _FACTOR[0] = 1.01
    except ImpureHook as error:
        return {"said": str(error)}
    if fleet.host.graphs is None:
        return {"said": "no CUDA device"}
    return {"failed": f"it was not found: {fleet.host.graphs.counts}"}


def _graphs_beside_steps(
    device: torch.device, plan: Blueprint, population: Population, tolerance: float = 0.0
) -> Values:
    """Compare both, and say which share of the steps was replayed, and why the others were not."""
    replayed, fleet = _run(plan, population, device)
    taken = _finished(dataclasses.replace(plan, cuda_graphs=False), population, device)
    counts = fleet.host.graphs.counts if fleet.host.graphs else Counter[str]()
    reasons = "; ".join(sorted({*counts} - {graphs.REPLAYED})) if counts else "no CUDA device"
    share = counts[graphs.REPLAYED] / max(1, counts.total())
    return _compared(replayed, taken, tolerance) | {"replayed": share, "not_used": reasons}


def _case_with_graphs(device: torch.device, case: Callable[[Any], Any]) -> Values:
    states = list[Any]()
    for steps in (2, 10**9):  # before a step is captured
        with mock.patch.object(graphs, "ENOUGH_STEPS", steps):
            states.append(case(device))
    replayed, taken = states
    return _compared(replayed, taken, tolerance=0)


def determinism(check: Check) -> Iterator[Row]:
    """Two runs of the CNN and of every algorithm: are they equal to the bit?"""
    for title, deterministic, share in (("default", False, 0.5), ("deterministic", True, 1.0)):
        twice = partial(_twice, check.device, deterministic)
        plan, people = job("cnn", check.steps, 4, rounds=2, deterministic=deterministic)
        yield check.row(f"{title}, CNN", partial(twice, partial(_finished, plan, people)))
        yield from _of_cases(check.part(share), title, twice, variants=False, deterministic=deterministic)


def _of_cases(
    check: Check, title: str, work: Callable[[Callable[[Any], Any]], Values], width: int = 1, **changes: Any
) -> Iterator[Row]:
    """Yield a row for each case that is not as it should be, and one that counts the others."""
    from helpers.run_on_stand_in_device import algorithms

    cases = algorithms(width, **changes)
    if check.tiny:
        cases = dict(itertools.islice(cases.items(), 2))
    tried, differences = 0, [0.0]
    for name, case in cases.items():
        if check.is_over:
            break
        tried += 1
        row = check.row(f"{title}, {name}", partial(work, case))
        if "difference" in row.values:
            differences.append(row.values["difference"])
        else:
            yield row
    values = {"equal": len(differences) - 1, "tried": tried, "of": len(cases), "largest_difference": max(differences)}
    yield Row(f"{title}, cases", values)


def _beside_cpu(device: torch.device, case: Callable[[Any], Any], tolerance: float = TOLERANCE) -> Values:
    """Compare with the CPU; what draws random numbers on the device, as FRAug does in training, differs by them."""
    drawn, seed = [], torch.cuda.manual_seed_all

    def note() -> None:
        if device.type == "cuda":
            drawn.append(bool(torch.cuda.get_rng_state()[8:].any()))  # numbers drawn since the last seed

    def seeded(number: int) -> None:
        note()
        seed(number)

    there = case("cpu")
    with mock.patch.object(torch.cuda, "manual_seed_all", seeded):
        here = case(device)
    note()
    draws = any(drawn[1:])  # before the first seed are the draws of others
    values = _compared(here, there, float("inf") if draws else tolerance)
    return {"draws": values["difference"]} if draws and "difference" in values else values


def _twice(device: torch.device, deterministic: bool, case: Callable[[Any], Any]) -> Values:
    values = _compared(case(device), case(device), tolerance=0)
    return values if deterministic or "failed" not in values else {"differs": values["failed"]}  # as it may by default


def _compared(here: Any, there: Any, tolerance: float = TOLERANCE) -> Values:
    """Return the largest difference of two trees of tensors, each by the largest value of its tensor."""
    found, wanted = (dict(named_tensors(tree)) for tree in (here, there))
    if other := sorted(set(found) ^ set(wanted)):
        return {"failed": f"only one has {other[0]}"}
    worst, place = 0.0, ""
    for name, value in wanted.items():
        a, b = value.detach().cpu().double(), found[name].detach().cpu().double()
        if a.shape != b.shape or not bool(torch.isfinite(b).all()):
            return {"failed": f"{name} has other shapes or is not finite"}
        if a.numel():
            difference = float((a - b).abs().max() / a.abs().max().clamp(min=1e-3))
            worst, place = max((worst, place), (difference, name))
    return {"difference": worst} if worst <= tolerance else {"failed": f"{place} differs by {worst:.2g}"}


def _run(plan: Blueprint, population: Population, device: torch.device) -> tuple[Any, LocalFleet]:
    """Run all rounds; return the server's state, and the fleet."""
    fleet = LocalFleet(plan, population, device)
    server = Server(plan, population, fleet, Evaluation(points=()), device)
    list(server.run())
    return server.state, fleet


def _finished(plan: Blueprint, population: Population, device: torch.device) -> Any:
    return _run(plan, population, device)[0]


def networks(check: Check) -> Iterator[Row]:
    """A round of every network, one client at a time and three, against the CPU, where batch norm magnifies rounding;
    runs with every metric and augmentation finish."""
    from helpers.run_on_stand_in_device import models, simulations

    names = [name for name in models() if name not in ("fasttext", "har_cnn")]  # which take no images
    torch.use_deterministic_algorithms(False)  # as `models` chose
    with tempfile.TemporaryDirectory() as folder:
        runs = simulations(Path(folder))
        if check.tiny:
            names, runs = names[:1], dict(itertools.islice(runs.items(), 1))
        for name, width in itertools.product(names, (1, 3)):
            plan, people = job(name, 2, 3, vmap_clients=width, loss=_loss_of_all_places)
            finished = partial(_finished, plan, people)
            yield check.row(f"{name}, K={width}", partial(_beside_cpu, check.device, finished, tolerance=0.02))
        for name, run in runs.items():
            yield check.row(name, partial(_beside_cpu, check.device, run, tolerance=float("inf")))


def _loss_of_all_places(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the mean over an image's places, if there are several."""
    return F.cross_entropy(logits.flatten(2).mean(2) if logits.ndim > 2 else logits, y)


def options(check: Check) -> Iterator[Row]:
    """What users turn on for a GPU: lower precision, clients at once, many trials in one process, hosts on one GPU."""
    number = itertools.count()
    with _runs(check) as run:

        def new(**changes: Any) -> rayfed.Result:
            return run(**{"local.drop_last": True, "experiment": f"{next(number)}"} | changes)

        def beside_float32(**changes: Any) -> Values:
            values = _compared(new(**changes).server, new().server, tolerance=float("inf"))
            times = [[check.seconds(partial(new, **tried)) for tried in (changes, {})] for _ in range(check.rounds)]
            here, there = (statistics.median(column) for column in zip(*times, strict=True))
            return values | {"seconds_by_float32": here / there}

        def measured() -> Values:
            result = new(**{"placement.vmap_clients": "auto"})
            return {
                "clients_at_once": int(result.trials["vmap_clients"].item()),
                "s": result.rounds["seconds_total"].sum(),
            }

        def many() -> Values:
            used = [_memory_after(check, new) for _ in range(3 if check.tiny else 10)]
            values = {"MB": used[0] / 1e6, "grown_MB": (used[-1] - used[1]) / 1e6}
            return values | ({"failed": "every trial leaves memory"} if values["grown_MB"] > 1 else {})

        def adcol() -> Values:
            hosts = {"placement.hosts": 4, "placement.gpus": 0.25, "placement.cpus": 0.5}
            result = new(**{"algorithm.name": "adcol", "model.name": "resnet18", "rounds": check.rounds + 1}, **hosts)
            trained = result.rounds[result.rounds["round"] > 1]
            columns = {name: trained[name].median() for name in trained if name.startswith("seconds")}
            return columns | {"gpu_MB": trained["gpu_bytes"].max() / 1e6}

        yield check.row("TF32", lambda: beside_float32(**{"placement.tf32": True}))
        yield check.row("bf16", lambda: beside_float32(**{"local.precision": "bf16"}))
        yield check.row("vmap_clients=auto", measured)
        yield check.row("trials in one process", many)
        if check.device.type == "cuda" and importlib.util.find_spec("ray"):
            yield check.row("ADCOL, ResNet-18, four Ray hosts", adcol)


def _memory_after(check: Check, work: Callable[[], object]) -> int:
    """Return the bytes of tensors on the GPU after `work`; 0 on other devices."""
    work()
    gc.collect()
    return torch.cuda.memory_allocated() if check.device.type == "cuda" else 0


def assertion(check: Check) -> Iterator[Row]:
    """A CUDA assert in a process of its own is recognised, and does not reach this one."""

    def measure() -> Values:
        with ProcessPoolExecutor(1, get_context("spawn")) as child:
            values = child.submit(_assertion, str(check.device)).result()
        return values | {"this_process_computes": float(torch.ones(3, device=check.device).sum()) == 3}

    yield check.row("label out of range", measure)


def _assertion(device: str) -> Values:
    with _on(device) as here:
        try:
            F.cross_entropy(torch.zeros(1, 2, device=here), torch.tensor([5]).to(here)).item()
        except (RuntimeError, IndexError) as error:
            if here.type == "cuda" and not breaks_device(error):
                return {"failed": f"not recognised: {error_line(error)}"}
            return {"recognised": breaks_device(error)}
        return {"failed": "no error"}


def steps(check: Check) -> Iterator[Row]:
    """The cost of a step of K clients at once, with what starting and finishing a client costs shared out."""
    widths = (1, 3) if check.tiny else (1, 4, 16, 64, 256)
    networks = ["mlp"] if check.tiny else list(NETWORKS)
    for network in networks:
        yield check.row(f"{network}, SGD, bare loop", partial(_bare_cost, check, network))
    kinds = itertools.product(OPTIMIZERS.items(), (False, True), widths, networks)
    for (optimizer, rule), with_graphs, width, network in kinds:
        title = f"{network}, {optimizer}, K={width}{', graphs' * with_graphs}"
        yield check.row(title, partial(_our_cost, check, network, width, optimizer=rule, cuda_graphs=with_graphs))


def _bare_cost(check: Check, network: str) -> Values:
    set_kernels(deterministic=False, tf32=False)
    loop = plain(*job(network, check.steps, 4), channels_last=False, device=check.device)
    return _cost(check, loop, check.steps * 4)


def _our_cost(check: Check, network: str, width: int, **changes: Any) -> Values:
    plan, people = job(network, 2 * check.steps, width, **changes)
    work = exchange(plan, people, width, check.device)
    work()  # takes the steps before a capture
    return _cost(check, work, 2 * check.steps, clients=width)


def _cost(check: Check, work: Callable[[], object], steps: int, clients: int = 1) -> Values:
    """Return the microseconds of a step and, on CUDA, its launches, the share of the time in which the GPU computes,
    and the highest memory in MB."""
    if check.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    work()
    seconds = statistics.median(check.seconds(work) for _ in range(check.rounds))
    values = {"us_per_step": seconds / steps * 1e6, "us_per_client": seconds / steps / clients * 1e6}
    if check.device.type != "cuda":
        return values
    if seconds > 0.4:  # reading a trace of so many launches would take longer than all else
        return values
    peak = getattr(work(), "gpu_bytes", 0) or torch.cuda.max_memory_allocated()
    os.environ.update({"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"})  # or CUPTI crashes beside graphs
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        check.seconds(work)
    kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
    busy = sum(event.time_range.elapsed_us() for event in kernels) / (seconds * 1e6)
    return values | {"launches": len(kernels) / steps, "busy": busy, "peak_MB": peak / 1e6}


def rounds(check: Check) -> Iterator[Row]:
    """Rounds of a few large and of many small clients, in turn with the bare loop on the same device."""
    jobs = {"20 clients, CNN": ("cnn", 60, 20, (1, 20)), "100 clients, MLP": ("mlp", 10, 100, (1, 10, 100))}
    if check.tiny:
        jobs = {"4 clients, MLP": ("mlp", 2, 4, (1, 4))}
    for title, (network, count, clients, widths) in jobs.items():
        for width in widths:
            plan, people = job(network, count, clients, rounds=check.rounds + 1, vmap_clients=width)
            yield check.row(f"{title}, K={width}", partial(_rounds, check, plan, people))


def _rounds(check: Check, plan: Blueprint, population: Population) -> Values:
    server = Server(plan, population, LocalFleet(plan, population, check.device), Evaluation(points=()), check.device)
    last = server.ctx.task.channels_last
    bare = BareWorker(plan, population, range(len(population.clients)), check.device, channels_last=last)
    initial = state = state_of(plan.model)
    run, times = server.run(), []
    for number in range(1, plan.rounds + 1):
        ours = check.seconds(lambda: next(run))
        began = time.perf_counter()
        state = bare.round(number, state)  # ends with a copy to the CPU, so the device has finished
        times.append((ours, time.perf_counter() - began))
    weights = {name: value.cpu() for name, value in server.state["weights"].items()}
    start = {name: torch.from_numpy(value) for name, value in initial.items()}
    difference, moved = largest_difference(weights, state), largest_difference(start, state)
    if difference > 0.05 * moved:
        return {"failed": f"weights differ from the bare loop's by {difference:.1g}; training moved one by {moved:.1g}"}
    ours, bares = (statistics.median(column) for column in zip(*times[1:], strict=True))
    return {"s_per_round": ours, "bare_s_per_round": bares, "ratio": ours / bares}


def yardstick(check: Check) -> Iterator[Row]:
    """pfl-research's CIFAR-10 job, with its evaluation in every tenth round, and evaluations of many clients."""
    for title, schedule in (("constant rate", CONSTANT), ("rate that falls", Exponential(decay=0.99))):
        yield check.row(f"cifar10, {title}", partial(_cycles, check, schedule))
    yield check.row("cifar10, 10 at once", partial(_cycles, check, CONSTANT, width=10))
    yield check.row("cifar10, 10 at once, none ahead", partial(_cycles, check, CONSTANT, width=10, is_ahead=False))
    yield check.row("many clients scored", partial(_scoring, check))
    yield check.row("many clients' own models scored", partial(_own_scoring, check))


def _cycles(check: Check, schedule: LrSchedule, *, width: int = 50, is_ahead: bool = True) -> Values:
    users, cohort, every = (6, 2, 2) if check.tiny else (1000, 50, 10)
    yard = jobs.cifar10(3, users=users, cohort=cohort, every=every)
    if check.tiny:
        yard = dataclasses.replace(yard, test_x=yard.test_x[:20], test_y=yard.test_y[:20])
    made = jobs.plan_of(yard, hosts=0, results="results")
    plan = dataclasses.replace(made.blueprint, vmap_clients=min(width, cohort), drop_last=True, schedule=schedule)
    people = made.population
    fleet = LocalFleet(plan, people, check.device)
    if not is_ahead:
        fleet.host.room_ahead = 0
    evaluation = Evaluation(every=every, points=("global",), splits=("val",))
    run = Server(plan, people, fleet, evaluation, check.device).run()
    times = [check.seconds(lambda: next(run)) for _ in range(yard.rounds)]
    timed = times[every:]  # after a cycle that warms up
    counts = fleet.host.graphs.counts if fleet.host.graphs else Counter[str]()
    evaluated = statistics.median(timed[every - 1 :: every]) - statistics.median(timed)
    return {
        "ms_per_round": 1e3 * statistics.mean(timed),
        "ms_per_evaluation": 1e3 * evaluated,
        "replayed": counts[graphs.REPLAYED] / max(1, counts.total()),
    }


def _scoring(check: Check) -> Values:
    """Score the server's model on clients of five validation and five test images."""
    plan, people, request = _scored_clients(check, FedAvg())
    fleet = LocalFleet(plan, people, check.device)
    ctx = plan.context(people, check.device)
    model = plan.algorithm.global_model(ctx, plan.algorithm.init(ctx))
    return _seconds_of_scores(check, request, partial(fleet.score_global, request, model))


def _own_scoring(check: Check) -> Values:
    """Score the models that clients have with FedRep: a common body, and a head of their own."""
    plan, people, request = _scored_clients(check, FedRep())
    request = dataclasses.replace(request, points=("downloaded",))
    fleet = LocalFleet(plan, people, check.device)
    ctx = plan.context(people, check.device)
    down = plan.algorithm.broadcast(ctx, plan.algorithm.init(ctx))
    return _seconds_of_scores(check, request, partial(fleet.score_downloads, request, down, {}))


def _scored_clients(check: Check, algorithm: Algorithm) -> tuple[Blueprint, Population, ScoreRequest]:
    rng = np.random.default_rng(0)
    count = 10 if check.tiny else 1000

    def draw() -> Examples:
        return Examples(rng.integers(0, 256, (5, 1, 28, 28), dtype=np.uint8), rng.integers(0, 10, 5))

    clients = [Client(number, "all", draw(), draw(), draw()) for number in range(count)]
    people = Population("noise", ClientTable.of(clients), 10, (1, 28, 28), (0.5,), (0.5,))
    everyone = tuple(map(ClientIndex, range(count)))
    request = ScoreRequest(moment=Moment("round", 1), cohort=everyone, clients=everyone, splits=("val", "test"))
    return job("mlp", 1, 1, algorithm=algorithm)[0], people, request


def _seconds_of_scores(check: Check, request: ScoreRequest, score: Callable[[], object]) -> Values:
    score()
    times = [check.seconds(score) for _ in range(check.rounds)]
    return {"us_per_client": 1e6 * statistics.median(times) / len(request.clients)}


SECTIONS: dict[str, tuple[Callable[[Check], Iterator[Row]], float]] = {
    "smoke": (smoke, 50),
    "correctness": (correctness, 90),
    "replays": (replays, 75),
    "networks": (networks, 75),
    "determinism": (determinism, 50),
    "steps": (steps, 75),
    "rounds": (rounds, 45),
    "yardstick": (yardstick, 60),
    "options": (options, 60),
    "assertion": (assertion, 15),
}
"""The sections with their seconds. One that is not over in time leaves out the rest, or is killed ten seconds later."""


@contextlib.contextmanager
def _on(name: str) -> Iterator[torch.device]:
    """The device `name`, prepared as rayfed prepares it; `standin` is that of the tests."""
    if name.startswith("standin"):
        from helpers import stand_in_device

        stand_in_device.register()
        with stand_in_device.stand_in_device() as device:
            yield device
    else:
        yield device_for(1) if name.startswith("cuda") else torch.device(name)


def run_section(name: str, args: argparse.Namespace) -> None:
    """Run a section in this process and print each row as a line of JSON."""
    torch.set_num_threads(1)
    section, limit = SECTIONS[name]
    with _on(args.device) as device:
        check = Check(device, args.rounds, args.tiny, time.monotonic() + limit)
        for row in section(check):
            print(json.dumps(row._asdict()), flush=True)


def rows_of(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """Run a section in a process of its own and yield its rows as they come; the last one says if it failed."""
    command = [sys.executable, __file__, "--section", name, "--device", args.device, "--rounds", str(args.rounds)]
    command += ["--tiny"] * args.tiny
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    limit = SECTIONS[name][1] + 10
    timer = threading.Timer(limit, os.killpg, (process.pid, signal.SIGKILL))
    timer.start()
    output = [""]
    for line in process.stdout or ():
        if line.startswith('{"what"'):
            yield Row(**json.loads(line))
        elif line.strip():
            output.append(line.strip())
    status = process.wait()
    timer.cancel()
    if status:
        why = f"stopped after {limit:.0f} s" if status == -signal.SIGKILL else output[-1]
        yield Row("the section", {"failed": why, "output": output[-40:]})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS), help="sections to run")
    parser.add_argument("--rounds", type=int, default=3, help="timed rounds, after one warm-up round")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="file to write")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or standin, the device of the tests")
    parser.add_argument("--tiny", action="store_true", help="do next to nothing, to try the script itself")
    parser.add_argument("--section", choices=list(SECTIONS), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.section:
        run_section(args.section, args)
        return 0
    if args.device == "cuda" and not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        return 0
    table: dict[str, list[Row]] = {}
    for name in args.only:
        began = time.perf_counter()
        for row in rows_of(name, args):
            table.setdefault(name, []).append(row)
            cells = (f"{k} {f'{v:.3g}' if isinstance(v, float) else v}" for k, v in row.values.items() if k != "output")
            print(f"{name:<12} {row.what:<48} {', '.join(cells)}", flush=True)
        print(f"{name:<12} {'took':<48} {time.perf_counter() - began:.0f} s", flush=True)
        content = {section: [row._asdict() for row in rows] for section, rows in table.items()}
        args.json.write_text(json.dumps(content, indent=1))  # after each section, so that a broken run leaves something
    failed = sum("failed" in row.values for rows in table.values() for row in rows)
    print(f"{failed} rows failed; all rows are in {args.json}")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
