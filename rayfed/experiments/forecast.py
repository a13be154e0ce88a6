"""About how long a run or a sweep would take, from two short rounds of two clients."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from rayfed.algorithm import Context, Exchange
from rayfed.core.ids import ClientIndex, Moment, Stage
from rayfed.core.rng import torch_state_kept
from rayfed.data.clients import SPLITS
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Server
from rayfed.engine.training import steps_of
from rayfed.experiments.capacity import at_once
from rayfed.experiments.plan import Plan
from rayfed.experiments.small_population import small_population
from rayfed.metrics.base import OfGradients, OfRepresentations

_CLIENTS = 2  # of a probe
_BATCHES = 8  # of each of its clients
_PATIENCE = 4.0  # seconds of the first round, which warms up, from which on there is no second one
_SCORED = 128  # examples of each part of a client that a probe scores
_NOT_MEASURED = OfRepresentations, OfGradients  # metrics whose time depends on all data that they see


@dataclass(frozen=True)
class Probe:
    """What a probe measured.

    Attributes:
        step: Seconds of a step of local training, with its share of everything that a round does beside.
        score: Seconds to score one example.
    """

    step: float
    score: float


@dataclass(frozen=True)
class Estimate:
    """The expected seconds of a trial, without metrics of representations and of gradients.

    Attributes:
        round: Seconds of a round without scores.
        scores: Seconds of scoring once.
        total: Seconds of what is left of the trial, with its setup and final exchanges.
    """

    round: float
    scores: float
    total: float


def unmeasured(plan: Plan) -> list[str]:
    """Return the metrics of a plan whose time is in no estimate."""
    return [name for name, metric in plan.evaluation.metrics.items() if isinstance(metric, _NOT_MEASURED)]


def probe(plan: Plan, device: str | torch.device = "cpu") -> Probe:
    """Run one or two short rounds of `plan` with two clients, cut to a few batches, and measure the last of them.

    Nothing is written. Errors are those of the trial itself.
    """
    population = small_population(plan.population, _CLIENTS, [_BATCHES * plan.blueprint.batch_size], _SCORED)
    number, local = len(population.clients), plan.blueprint.local
    local = local._replace(epochs=1 if local.steps is None else None, steps=local.steps and min(local.steps, _BATCHES))
    together = min(plan.blueprint.vmap_clients or 1, number)
    blueprint = replace(plan.blueprint, cohort=number, rounds=2, local=local, vmap_clients=together)
    metrics = {name: metric for name, metric in plan.evaluation.metrics.items() if name not in unmeasured(plan)}
    evaluation = replace(plan.evaluation, every=1, initial=False, stop_rule=None, metrics=metrics)
    small = replace(plan, blueprint=blueprint, population=population, evaluation=evaluation)
    cold = torch.device(device).type == "cuda"  # the first round loads kernels, which takes seconds
    began = time.monotonic()
    with torch_state_kept():
        fleet = LocalFleet(blueprint, population, device)
        try:
            for record in Server(blueprint, population, fleet, evaluation, device).run():
                seconds = record.seconds
                late = not cold and time.monotonic() - began > _PATIENCE
                if record.round == 2 or (record.stage == "round" and late):
                    break
        finally:
            fleet.close()
    step = (seconds["total"] - seconds["evaluate"]) / max(round(_steps(small, "round") * number), 1)
    return Probe(step, seconds["evaluate"] / max(_scored(small), 1.0))


def estimate(plan: Plan, measured: Probe, *, done: int = 0) -> Estimate:
    """Return the expected seconds of the trial of `plan`, from the probe of a plan with the same model and method.

    Hosts are taken to share the work evenly, and hosts on one GPU to be as fast as one.

    Args:
        plan: The trial.
        measured: What the probe measured.
        done: The rounds that are done already; with any, the setup is, too.
    """
    blueprint, evaluation = plan.blueprint, plan.evaluation
    hosts = at_once(plan.config)
    everyone, cohort = len(plan.population.participants), blueprint.cohort
    shares: dict[Stage, int] = {"setup": everyone, "round": cohort, "final": everyone}
    seconds = {
        stage: _steps(plan, stage) * clients * measured.step / min(hosts, clients) for stage, clients in shares.items()
    }
    scored = {"all": everyone, "selected": cohort}.get(str(evaluation.clients)) or int(evaluation.clients)
    scores = _scored(plan, scored / everyone) * measured.score / hosts
    left = range(done + 1, blueprint.rounds + 1)
    times = sum(evaluation.due(number, blueprint.rounds) for number in left)
    total = (0.0 if done else seconds["setup"]) + len(left) * seconds["round"] + times * scores + seconds["final"]
    return Estimate(seconds["round"], scores, total)


def _steps(plan: Plan, stage: Stage) -> float:
    """Return the mean number of steps of a client in all exchanges of a stage; at least one for each exchange."""
    cohort = tuple(map(ClientIndex, range(plan.blueprint.cohort)))
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=cohort)
    exchanges = plan.blueprint.algorithm.exchanges(stage)
    sizes = plan.population.participants.train_sizes()
    return sum(_mean_steps(plan, exchange, ctx.at(Moment(stage, 1, k)), sizes) for k, exchange in enumerate(exchanges))


def _mean_steps(plan: Plan, exchange: Exchange, ctx: Context, sizes: np.ndarray) -> float:
    drop_last = plan.blueprint.drop_last
    different, counts = np.unique(sizes, return_counts=True)
    steps = [steps_of(exchange, ctx.at(client=0, examples=size), drop_last=drop_last) for size in different.tolist()]
    return max(1.0, float(np.average(steps, weights=counts)))


def _scored(plan: Plan, share: float = 1.0) -> float:
    """Return the number of examples that are scored at once, with a share of the participants."""
    columns = [SPLITS.index(split) for split in plan.evaluation.splits if split in SPLITS]
    examples = int(plan.population.participants.sizes[:, columns].sum())
    tests = sum(len(test.examples) for test in plan.population.tests)
    if tests and plan.blueprint.global_model(plan.population)[0] is None:  # then each client's model is scored
        foreign = sum(len(test.examples) for test in plan.population.tests if test.split == "ood")
        tests = round(foreign * share * len(plan.population.participants))
    return examples * share * len(plan.evaluation.points) + tests


def probe_key(values: Mapping[str, Any]) -> str:
    """Return a text that is the same for configurations whose steps take as long: all but how many there are."""
    local = {key: value for key, value in values["local"].items() if key in ("batch_size", "optimizer")}
    algorithm = values["algorithm"]["name"], values["algorithm"].get("base")
    kinds = [values[key] for key in ("data", "partition", "model", "augment", "leave_out", "batch_norm")]
    return repr((algorithm, kinds, local, sorted(values["placement"].items()), values["metrics"]))
