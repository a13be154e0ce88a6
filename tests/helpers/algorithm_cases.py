"""Every algorithm with small options, and some variants: the cases of the contract that all algorithms keep."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from helpers.federations import adapted, blobs, blueprint, net, new_server, on_pictures, reshaped, simulate
from helpers.slow import slow_but
from rayfed.algorithm import Algorithm, ClientData, Context, Phase, Replies, State
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.common.wrapper import innermost
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD, Adam
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, add, scale, sub, zeros_like
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.server import Record, Server
from rayfed.experiments.checks import check_trial
from rayfed.experiments.components import choose

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


@dataclasses.dataclass(frozen=True, eq=False)  # hashed by identity, so that runs can be cached
class Case:
    """An algorithm with its options, and what it allows."""

    options: Any = dataclasses.field(default_factory=dict)  # with `name`, or an algorithm
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)  # of the blueprint
    sampled: bool = True  # clients may be sampled
    noisy: bool = False  # draws random numbers in `step`, which differ between widths


NO_NORM = {"model": net(batch_norm=False)}
CASES = {name: Case({"name": name}) for name in ALGORITHMS} | {
    "gen_afl": Case({"name": "gen_afl"}, NO_NORM),
    "vm": Case({"name": "vm", "beta": 1.0}, NO_NORM),
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
    "flora": Case({"name": "flora"}, {"model": adapted(net())}),
    "het_lora": Case({"name": "het_lora", "gamma": 1.0}, {"model": adapted(net())}),
    # variants
    "mine": Case(Mine(momentum=0.3)),
    "fedavg, moments kept": Case({"name": "fedavg"}, {"optimizer": SGD(lr=0.05, momentum=0.9), "keep_optimizer": True}),
    "fedavg, local statistics": Case({"name": "fedavg"}, {"batch_norm": "local_statistics"}),
    "fedprox, frozen": Case({"name": "fedprox"}, {"batch_norm": "frozen"}),
    "scaffold, momentum": Case({"name": "scaffold"}, {"optimizer": SGD(lr=0.05, momentum=0.9), "batch_norm": "local"}),
    "moon, local": Case({"name": "moon"}, {"batch_norm": "local"}),
    "fedrep, moments kept": Case(
        {"name": "fedrep", "head_epochs": 2}, {"optimizer": Adam(lr=0.01, eps=1e-3), "keep_optimizer": True}
    ),
    "ditto, moments kept": Case(
        {"name": "ditto"}, {"optimizer": SGD(lr=0.05, momentum=0.9), "keep_optimizer": True, "batch_norm": "local"}
    ),
    "vm, local statistics": Case({"name": "vm", "beta": 1.0, "variant": "code"}, {"batch_norm": "local_statistics"}),
    "adcol, cache": Case({"name": "adcol", "hidden": [16], "cache": True}),
    "adcol, fixed size": Case({"name": "adcol", "hidden": [16], "fixed_size": True}),
    "adcol, more discriminators": Case(
        {"name": "adcol", "hidden": [16], "discriminators": 3, "share_predictor": True, "mu": 0.5}
    ),
    "dp_adcol, curious": Case({"name": "local_dp_adcol", "sampling": 0.4, "guarantee": "strict"}),
    "adcol, a share": Case({"name": "adcol", "hidden": [16], "sampling": 0.4}),
    "feddebias, once": Case({"name": "feddebias", "widths": [16, 8], "transfer": "once"}),
    "fedproto, models shared": Case({"name": "fedproto", "share_model": True, "weighting": "examples"}),
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
        {"name": "feddebias", "widths": [16, 8]}, {"optimizer": SGD(lr=0.05, momentum=0.9), "keep_optimizer": True}
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
        {"name": "fedrod"}, {"optimizer": SGD(lr=0.05, momentum=0.9), "keep_optimizer": True, "batch_norm": "local"}
    ),
    "apfl, paper": Case({"name": "apfl", "variant": "paper"}, {"batch_norm": "local", "keep_optimizer": True}),
    "pfedme, local": Case({"name": "pfedme", "beta": 2.0, "lam": 5.0}, {"batch_norm": "local"}),
    "per_fedavg, hf": Case({"name": "per_fedavg", "variant": "hf", "beta": 0.02}, {"batch_size": 3}),
    "fedfomo, two models": Case({"name": "fedfomo", "models": 2}, {"batch_norm": "local_statistics"}),
    "apple, local": Case({"name": "apple", "relation_lr": 0.01}, {"batch_norm": "local"}, sampled=False),
    "feddyn, local": Case({"name": "feddyn", "alpha": 0.1}, {"batch_norm": "local"}),
}


MAIN_CASES = pytest.mark.parametrize("case", slow_but(ALGORITHMS, CASES))  # for what depends little on a variant


def build_algorithm(values: Mapping[str, Any] | str) -> Algorithm:
    """Return the algorithm called `values["name"]` with its hyperparameters."""
    return choose("algorithm", {"name": values} if isinstance(values, str) else values, "fedavg").build()


def algorithm_of(case: Case) -> Algorithm:
    return case.options if isinstance(case.options, Algorithm) else build_algorithm(case.options)


def plan_of(case: Case, *, algorithm: Algorithm | None = None, **changes: Any):
    algorithm = algorithm or algorithm_of(case)
    return blueprint(algorithm, people_of(algorithm), **(case.changes | changes))


def people_of(algorithm: Algorithm):
    return PICTURES if innermost(algorithm).name == "harmofl" else PEOPLE


def server_of(plan, points: Sequence[str] = (), **evaluation: Any) -> Server:
    people = people_of(plan.algorithm)
    check_trial(plan, people)
    return new_server(plan, people, points=tuple(points), **evaluation)


def finished(plan) -> Server:
    server = server_of(plan)
    list(server.run())
    return server


def everything(server: Server) -> dict[str, Any]:
    constants = server.ctx.task.model.constants
    return {"server": server.state, "clients": dict(server.fleet.states), "constants": constants}


@dataclasses.dataclass
class Run:
    """A finished simulation: the server, its records, and the server's logged scalars after each record."""

    server: Server
    records: list[Record]
    scalars: list[dict[str, float]]


@functools.cache
def default_run(case: Case) -> Run:
    """Run `case` with the defaults of `blueprint`, once for all tests that compare against it."""
    server = server_of(plan_of(case))
    records, scalars = [], []
    for record in server.run():
        records.append(record)
        state, names = server.state, server.algorithm.traits.logged_scalars
        scalars.append({name: float(state[name]) for name in names if name in state})
    return Run(server, records, scalars)


def scored_points(case: Case) -> list[str]:
    """Return the evaluation points at which there is a model: all, or all but the global one."""
    server = default_run(case).server
    algorithm = server.algorithm
    return list(POINTS if algorithm.global_model(server.ctx, server.state) is not None else POINTS[1:])


SIX = blobs(6)
SIX_WITH_PICTURES = reshaped(SIX, (1, 2, 3))


def sampled_plan(name: str) -> tuple[Blueprint, Population]:
    """Return the most demanding plan that `name` accepts: two thirds of six clients a round, with batch norm."""
    options = {"server_steps": 20} if name == "fedgen" else {}  # the 1000 of the default take most of the time of all
    algorithm = build_algorithm({"name": name, **options})
    for cohort, batch_norm, people in ((4, True, SIX), (6, True, SIX), (6, False, SIX), (4, True, SIX_WITH_PICTURES)):
        model = net(batch_norm) if people is SIX else on_pictures(net(batch_norm))
        model = adapted(model) if name in ("flora", "het_lora") else model
        plan = blueprint(algorithm, people, model=model, cohort=cohort, rounds=3)
        try:
            check_trial(plan, people)
        except UsageError:
            continue
        return plan, people
    raise AssertionError(f"{name} refuses everything")


def finished_alone(name: str) -> Server:
    """Run `sampled_plan` in this process."""
    plan, people = sampled_plan(name)
    return simulate(plan, people, every=2)[0]
