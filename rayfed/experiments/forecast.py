"""What `--dry-run` prints: what would run, what each trial reserves, and about how long it takes.

The time comes from two short rounds of two clients. Once trials run, the measured rounds say more.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.rng import global_state_kept
from rayfed.core.terminal import plain_table
from rayfed.data.population import SPLITS, small_population
from rayfed.engine.clock import NO_CLOCK
from rayfed.engine.device import device_for
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.engine.training import steps_of
from rayfed.experiments.capacity import bundles, check_run, check_sweep, fits, known_nodes
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.progress import span
from rayfed.experiments.run_summary import run_summary
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import Populations, plan_kind, plan_sweep
from rayfed.experiments.trial import check_rounds
from rayfed.experiments.units import counted
from rayfed.records.tracking import check_tracking

_CLIENTS, _BATCHES = 2, 8  # of a probe, and batches of each client
_SCORED = 128  # examples of each part of a client that a probe scores
_MOST_AT_ONCE = 64  # the most trials that are counted as fitting at once


class Probe(NamedTuple):
    """Seconds of a step of local training, with its share of the rest of a round, and seconds to score an example."""

    step: float
    score: float


class Estimate(NamedTuple):
    """Expected seconds: of a round without scores, of scoring once, and of all rounds."""

    round: float
    scores: float
    total: float


def run_text(plan: Plan) -> str:
    """Return what `plan` is, what it reserves, and how long it will take."""
    config = plan.config
    check_run(config.placement)
    check_tracking(config.tracking, config.results)
    check_rounds({plan.trial: config})
    about = expected = _estimated(plan, {})
    if isinstance(expected, Estimate):
        each = f"{expected.round:.2g} s per round, {expected.scores:.2g} s for scores"
        about = f"about {span(expected.total)} ({each}), without metrics.*, from a probe of two clients"
    return f"{run_summary(plan)}\n     needs  {_reserved(config.placement)}\n  estimate  {about}"


def sweep_text(space: Space, configs: Sequence[Config]) -> str:
    """Return for each arm of `space` what a trial reserves and takes, and how long the trials to run will take."""
    check_sweep(config.placement for config in configs)
    plan, populations = plan_sweep(space, configs), Populations(keep_all=True)
    probes, estimates = dict[str, Probe | str](), dict[str, Estimate | str]()
    rows, seconds, first = [], list[float](), 0
    for number, arm in enumerate(space.arms):
        of_arm = configs[first : first + len(arm)]
        first += len(arm)
        for config in of_arm:
            if (kind := plan_kind(config)) not in estimates:
                estimates[kind] = _estimated(populations.plan(config, Given()), probes)
        found = [estimates[plan_kind(config)] for config in of_arm]
        known = [expected.total for expected in found if isinstance(expected, Estimate)]
        seconds += known
        each = " to ".join(dict.fromkeys(map(span, (min(known), max(known))))) if known else str(found[0])
        trials = len(space.seeds) * (space.samples[number] if space.adaptive else len(of_arm))
        rows.append([of_arm[0].algorithm_name, str(trials), _reserved(of_arm[0].placement), each])
    columns = dict(zip(["algorithm", "trials", "needs", "each"], zip(*rows, strict=True), strict=True))
    table = plain_table(columns, left=["algorithm", "needs"], width=shutil.get_terminal_size((100, 24)).columns)
    to_run = space.searched_trials if space.adaptive else len(plan.jobs)
    nodes = known_nodes()  # None: a running cluster that is not joined
    limit = min(space.search.max_concurrent or _MOST_AT_ONCE, _MOST_AT_ONCE)
    needs = [bundles(placement) for placement in {config.placement for config in configs}]
    numbers = range(1, limit + 1) if nodes is not None else ()
    together = max((n for n in numbers if all(fits(needed * n, nodes or ()) for needed in needs)), default=1)
    about = "one after another at most" if nodes is None else f"{together} at once: about"
    total = max(sum(seconds) / max(len(seconds), 1) * to_run / together, max(seconds, default=0.0))
    end = f"{counted(to_run, 'trial')} to run, {about} {span(total)}"
    return "\n".join([plan.summary(), "", table, "", end])


def probe(plan: Plan, device: str | torch.device = "cpu") -> Probe:
    """Run two short rounds of `plan` with two clients, cut to a few batches, and measure the second.

    Nothing is written. Errors are those of the trial itself.
    """
    population = small_population(plan.population, _CLIENTS, [_BATCHES * plan.blueprint.batch_size], _SCORED)
    number, local = len(population.clients), plan.blueprint.local
    local = local._replace(epochs=1 if local.steps is None else None, steps=local.steps and min(local.steps, _BATCHES))
    together = min(plan.blueprint.vmap_clients or 1, number)
    small_form: dict[str, Any] = {"cohort": number, "rounds": 2, "local": local, "vmap_clients": together}
    blueprint = replace(plan.blueprint, clock=NO_CLOCK, buffered=None, **small_form)
    evaluation = replace(plan.evaluation, every=1, initial=False, stop_rule=None, metrics={})
    small = replace(plan, blueprint=blueprint, population=population, evaluation=evaluation)
    with global_state_kept():
        fleet = LocalFleet(blueprint, population, device)
        records = Server(blueprint, population, fleet, evaluation, device).run()
        seconds = next(record.seconds for record in records if record.round == 2)  # the first round warms up
    step = (seconds["total"] - seconds["evaluate"]) / max(round(_steps(small) * number), 1)
    return Probe(step, seconds["evaluate"] / max(_scored(small), 1.0))


def estimate(plan: Plan, measured: Probe) -> Estimate:
    """Return the expected seconds of the rounds of `plan`, from the probe of a plan with the same model and method.

    Hosts are assumed to share the work evenly, and hosts on one GPU to be as fast as one host. Left out are metrics.*,
    and what a method does before the first round and after the last one.
    """
    blueprint, evaluation, place = plan.blueprint, plan.evaluation, plan.config.placement
    hosts = max(1, place.hosts)
    if 0 < place.gpus < 1:
        hosts = math.ceil(hosts * place.gpus - 1e-6)
    everyone, cohort = len(plan.population.participants), blueprint.cohort
    each = _steps(plan) * cohort * measured.step / min(hosts, cohort)
    scored = {"all": everyone, "selected": cohort}.get(str(evaluation.clients)) or int(evaluation.clients)
    scores = _scored(plan, scored / everyone) * measured.score / hosts
    times = sum(evaluation.due(number, blueprint.rounds) for number in range(1, blueprint.rounds + 1))
    return Estimate(each, scores, max(1.0, blueprint.rounds * each + times * scores))


def _estimated(plan: Plan, probes: dict[str, Probe | str]) -> Estimate | str:
    """Return the estimate, or why there is none; configurations whose steps take the same time share a probe."""
    tree = plan.config.tree()
    local = tree["local"]["batch_size"], tree["local"]["optimizer"]
    algorithm = tree["algorithm"]["name"], tree["algorithm"].get("base")
    kinds = [tree[key] for key in ("data", "partition", "model", "augment", "leave_out", "batch_norm", "placement")]
    key = repr((algorithm, local, kinds))
    if key not in probes:
        try:
            probes[key] = probe(plan, device_for(plan.config.placement.gpus, plan.blueprint.model))
        except Exception as error:  # for example of a method that needs more than two clients
            probes[key] = f"unknown ({type(error).__name__}: {str(error).partition(chr(10))[0][:60]})"
    measured = probes[key]
    return measured if isinstance(measured, str) else estimate(plan, measured)


def _steps(plan: Plan) -> float:
    """Return the mean number of steps of a client in a round; at least 1 for each exchange."""
    cohort = tuple(map(ClientIndex, range(plan.blueprint.cohort)))
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=cohort)
    sizes, counts = np.unique(plan.population.participants.train_sizes(), return_counts=True)
    total = 0.0
    for k, exchange in enumerate(plan.blueprint.algorithm.exchanges("round")):
        clients = [ctx.at(Moment("round", 1, k), client=0, examples=size) for size in sizes.tolist()]
        steps = [steps_of(exchange, client, drop_last=plan.blueprint.drop_last) for client in clients]
        total += max(1.0, float(np.average(steps, weights=counts)))
    return total


def _scored(plan: Plan, share: float = 1.0) -> float:
    """Return the number of examples in one evaluation of a share of the participants."""
    population = plan.population
    columns = [SPLITS.index(split) for split in plan.evaluation.splits if split in SPLITS]
    examples = share * int(population.participants.sizes[:, columns].sum()) * len(plan.evaluation.points)
    if not population.tests or plan.blueprint.global_model(population)[0] is not None:
        return examples + sum(len(test.examples) for test in population.tests)
    foreign = sum(len(test.examples) for test in population.tests if test.split == "ood")
    return examples + share * foreign * len(population.participants)  # each client's model is scored on them


def _reserved(placement: Placement) -> str:
    needed = bundles(placement)
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in total.items() if amount)
    return f"{amounts or 'no reservation'} ({placement.description})"
