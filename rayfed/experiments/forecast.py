"""What `--dry-run` prints: what would run, what each trial reserves, and about how long it takes.

The time comes from two short rounds of two clients. Once trials run, the measured rounds say more.
"""

import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.rng import global_state_kept
from rayfed.core.terminal import plain_table
from rayfed.core.words import counted
from rayfed.data.population import SPLITS, small_population
from rayfed.engine.device import device_for
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.engine.training import steps_of
from rayfed.experiments.capacity import bundles, check_run, check_sweep, fits, known_nodes, together
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.given import Given
from rayfed.experiments.plan import Plan
from rayfed.experiments.plan_channel import for_fewer_clients
from rayfed.experiments.progress import span
from rayfed.experiments.run_summary import run_summary
from rayfed.experiments.simulation import check_rounds
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import Populations, plan_kind, plan_sweep
from rayfed.records.tracking import check_tracking

_CLIENTS = 2  # of a probe
_BATCHES = 8  # of each client of a probe
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
    expected = _estimated(plan, {})
    if isinstance(expected, Estimate):
        each = f"{expected.round:.2g} s per round, {expected.scores:.2g} s for scores"
        about = f"about {span(expected.total)} ({each}), without metrics.*, from a probe of two clients"
    else:
        about = expected
    return f"{run_summary(plan)}\n     needs  {_reserved(config.placement)}\n  estimate  {about}"


def sweep_text(space: Space, configs: Sequence[Config]) -> str:
    """Return for each arm of `space` what a trial reserves and takes, and how long the trials to run will take."""
    check_sweep(config.placement for config in configs)
    plan = plan_sweep(space, configs)
    estimates = _estimates(configs)
    rows = []
    seconds: list[float] = []
    first = 0
    for number, arm in enumerate(space.arms):
        of_arm = configs[first : first + len(arm)]
        first += len(arm)
        found = [estimates[plan_kind(config)] for config in of_arm]
        known = [expected.total for expected in found if isinstance(expected, Estimate)]
        seconds += known
        each = str(found[0])
        if known:
            each = _range_of(known)
        configurations = len(of_arm)
        if space.adaptive:
            configurations = space.samples[number]
        trials = len(space.seeds) * configurations
        rows.append([of_arm[0].algorithm_name, str(trials), _reserved(of_arm[0].placement), each])
    to_run = len(plan.jobs)
    if space.adaptive:
        to_run = space.searched_trials
    end = _expected_end(space, configs, seconds, to_run)
    return "\n".join([plan.summary(), "", _table(rows), "", end])


def _estimates(configs: Sequence[Config]) -> dict[str, Estimate | str]:
    """Return the estimates of `configs`, or why there are none, by the kinds of their plans."""
    populations = Populations(keep_all=True)
    probes: dict[str, Probe | str] = {}
    estimates: dict[str, Estimate | str] = {}
    for config in configs:
        kind = plan_kind(config)
        if kind not in estimates:
            plan = populations.plan(config, Given())
            estimates[kind] = _estimated(plan, probes)
    return estimates


def _range_of(seconds: Sequence[float]) -> str:
    """Return the shortest and the longest of some times in words, once if they read the same."""
    shortest = span(min(seconds))
    longest = span(max(seconds))
    if shortest == longest:
        return shortest
    return f"{shortest} to {longest}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    headers = ["algorithm", "trials", "needs", "each"]
    values = zip(*rows, strict=True)
    columns = dict(zip(headers, values, strict=True))
    width = shutil.get_terminal_size((100, 24)).columns
    return plain_table(columns, left=["algorithm", "needs"], width=width)


def _expected_end(space: Space, configs: Sequence[Config], seconds: Sequence[float], to_run: int) -> str:
    """Return how many trials run, how many of them at once, and for about how long; `seconds` are known times."""
    nodes = known_nodes()
    if nodes is None:  # a running cluster that is not joined
        together = 1
        about = "one after another at most"
    else:
        together = _most_at_once(space, configs, nodes)
        about = f"{together} at once: about"
    mean = sum(seconds) / max(len(seconds), 1)
    total = max(mean * to_run / together, max(seconds, default=0.0))
    return f"{counted(to_run, 'trial')} to run, {about} {span(total)}"


def _most_at_once(space: Space, configs: Sequence[Config], nodes: Sequence[dict[str, float]]) -> int:
    """Return how many trials fit on `nodes` at once, whichever of `configs` they have; at least 1."""
    limit = min(space.search.max_concurrent or _MOST_AT_ONCE, _MOST_AT_ONCE)
    placements = {config.placement for config in configs}
    needs = [bundles(placement) for placement in placements]
    most = 1
    for number in range(1, limit + 1):
        if all(fits(needed * number, nodes) for needed in needs):
            most = number
    return most


def probe(plan: Plan, device: str | torch.device = "cpu") -> Probe:
    """Run two short rounds of `plan` with two clients, cut to a few batches, and measure the second.

    Nothing is written. Errors are those of the trial itself.
    """
    small = _small_form(plan)
    with global_state_kept():
        fleet = LocalFleet(small.blueprint, small.population, device)
        records = Server(small.blueprint, small.population, fleet, small.evaluation, device).run()
        seconds = next(record.seconds for record in records if record.round == 2)  # the first round warms up
    training = seconds["total"] - seconds["evaluate"]
    steps = round(_steps(small) * len(small.population.clients))
    score = seconds["evaluate"] / max(_scored(small), 1.0)
    return Probe(training / max(steps, 1), score)


def _small_form(plan: Plan) -> Plan:
    """Return `plan` with two clients that are always there, a few batches, and two rounds that are scored."""
    population = small_population(plan.population, _CLIENTS, [_BATCHES * plan.blueprint.batch_size], _SCORED)
    number = len(population.clients)
    local = plan.blueprint.local
    if local.steps is None:
        local = local._replace(epochs=1)
    else:
        local = local._replace(epochs=None, steps=min(local.steps, _BATCHES))
    blueprint = plan.blueprint.undisturbed(
        algorithm=for_fewer_clients(plan.blueprint.algorithm, number),
        cohort=number,
        rounds=2,
        local=local,
        vmap_clients=min(plan.blueprint.vmap_clients or 1, number),
    )
    evaluation = replace(plan.evaluation, every=1, initial=False, stop_rule=None, metrics={}, left_out=frozenset())
    return replace(plan, blueprint=blueprint, population=population, evaluation=evaluation)


def estimate(plan: Plan, measured: Probe) -> Estimate:
    """Return the expected seconds of the rounds of `plan`, from the probe of a plan with the same model and method.

    Hosts are assumed to share the work evenly, and hosts on one GPU to be as fast as one host. Left out are metrics.*,
    and what a method does before the first round and after the last one.
    """
    blueprint = plan.blueprint
    hosts = _hosts_at_work(plan.config.placement)
    cohort = blueprint.cohort
    training = _steps(plan) * cohort * measured.step / min(hosts, cohort)
    participants = len(plan.population.participants)
    scored = _clients_scored(plan) / participants
    scores = _scored(plan, scored) * measured.score / hosts
    times = 0
    for number in range(1, blueprint.rounds + 1):
        times += plan.evaluation.due(number, blueprint.rounds)
    return Estimate(training, scores, max(1.0, blueprint.rounds * training + times * scores))


def _hosts_at_work(placement: Placement) -> int:
    """Return how many hosts work at full speed: those on one GPU count as one."""
    hosts = max(1, placement.hosts)
    if 0 < placement.gpus < 1:
        return math.ceil(hosts * placement.gpus - 1e-6)
    return hosts


def _clients_scored(plan: Plan) -> int:
    clients = plan.evaluation.clients
    if clients == "all":
        return len(plan.population.participants)
    if clients == "selected":
        return plan.blueprint.cohort
    return int(clients)


def _estimated(plan: Plan, probes: dict[str, Probe | str]) -> Estimate | str:
    """Return the estimate, or why there is none; configurations whose steps take the same time share a probe."""
    key = _probe_key(plan.config)
    if key not in probes:
        try:
            probes[key] = probe(plan, device_for(plan.config.placement.gpus, plan.blueprint.model))
        except Exception as error:  # for example of a method that needs more than two clients
            line, _, _ = str(error).partition("\n")
            probes[key] = f"unknown ({type(error).__name__}: {line[:60]})"
    measured = probes[key]
    if isinstance(measured, str):
        return measured
    return estimate(plan, measured)


def _probe_key(config: Config) -> str:
    """Return a string that two configurations share if a step of theirs takes the same time."""
    tree = config.tree()
    local = tree["local"]
    algorithm = tree["algorithm"]
    values = [algorithm["name"], algorithm.get("base"), local["batch_size"], local["optimizer"]]
    for key in ("data", "partition", "model", "augment", "leave_out", "batch_norm", "placement"):
        values.append(tree[key])
    return repr(values)


def _steps(plan: Plan) -> float:
    """Return the mean number of steps of a client in a round; at least 1 for each exchange."""
    cohort = tuple(ClientIndex(place) for place in range(plan.blueprint.cohort))
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=cohort)
    sizes, counts = np.unique(plan.population.participants.train_sizes(), return_counts=True)
    total = 0.0
    for k, exchange in enumerate(plan.blueprint.algorithm.exchanges("round")):
        moment = Moment("round", 1, k)
        steps = []
        for size in sizes.tolist():
            client = ctx.at(moment, client=0, examples=size)
            steps.append(steps_of(exchange, client, drop_last=plan.blueprint.drop_last))
        total += max(1.0, float(np.average(steps, weights=counts)))
    return total


def _scored(plan: Plan, share: float = 1.0) -> float:
    """Return the number of examples in one evaluation of a share of the participants."""
    population = plan.population
    columns = [SPLITS.index(split) for split in plan.evaluation.splits if split in SPLITS]
    held = int(population.participants.sizes[:, columns].sum())
    examples = share * held * len(plan.evaluation.points)
    if not population.tests:
        return examples
    global_model, _ = plan.blueprint.global_model(population)
    if global_model is not None:
        return examples + sum(len(test.examples) for test in population.tests)
    foreign = sum(len(test.examples) for test in population.tests if test.split == "ood")
    return examples + share * foreign * len(population.participants)  # each client's model is scored on them


def _reserved(placement: Placement) -> str:
    needed = together(bundles(placement))
    amounts = []
    for name in ("CPU", "GPU"):
        if name in needed:
            amounts.append(f"{needed[name]:g} {name}")
    reserved = ", ".join(amounts) or "no reservation"
    return f"{reserved} ({placement.description})"
