"""What `--dry-run` prints: what would run, what each trial reserves, and about how long it takes.

The time comes from one or two short rounds of two clients. Once trials run, the measured rounds say more.
"""

import shutil
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from rayfed.core.ids import ClientIndex, Moment, Stage
from rayfed.core.rng import torch_state_kept
from rayfed.core.terminal import plain_table
from rayfed.data.clients import SPLITS
from rayfed.engine.checkpoint import newest_round
from rayfed.engine.device import device_for
from rayfed.engine.fleet import LocalFleet
from rayfed.engine.server import Server
from rayfed.engine.training import steps_of
from rayfed.experiments.capacity import at_once, bundles, check_run, check_sweep, fits, gpu_picture, known_nodes
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.plan import Given, Plan, trial_name
from rayfed.experiments.plan_data import small_population
from rayfed.experiments.progress import span
from rayfed.experiments.run_summary import counted, run_summary
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import Populations, plan_kind, plan_sweep
from rayfed.experiments.trial import check_rounds, nothing_left, resume_message, usable
from rayfed.metrics.base import OfGradients, OfRepresentations
from rayfed.records.checkpoints import CheckpointStore
from rayfed.records.storage import open_storage
from rayfed.records.tracking import check_trackers
from rayfed.records.trials import flattened

_CLIENTS, _BATCHES = 2, 8  # of a probe, and batches of each client
_SCORED = 128  # examples of each part of a client that a probe scores
_PATIENCE = 4.0  # seconds of a first round after which a probe ends without a second round
_NOT_MEASURED = OfRepresentations, OfGradients  # metrics whose time depends on all data that they see
_ROWS = 30  # of the table
_AT_ONCE = 64  # the most trials that are counted as fitting at once


class Probe(NamedTuple):
    """Seconds of a step of local training, with its share of the rest of a round, and seconds to score an example."""

    step: float
    score: float


class Estimate(NamedTuple):
    """Expected seconds: of a round without scores, of scoring once, and of all that is left of the trial."""

    round: float
    scores: float
    total: float


def run_text(plan: Plan) -> str:
    """Return what `plan` is, what it reserves, and how long it will take."""
    config = plan.config
    check_run(config.placement)
    check_trackers(vars(config.tracking), config.results)
    check_rounds({plan.trial: config})
    lines, done, finished = {"needs": _reserved(config.placement)}, 0, False
    if picture := gpu_picture(config, known_nodes() or []):
        lines["GPUs"] = picture
    if config.resume:
        store = CheckpointStore(open_storage(config.results).child(config.experiment), plan.trial)
        saved = usable(config, store.saved())
        lines["resume"] = resume_message(config, saved)
        done, finished = newest_round(saved) or 0, bool(saved) and nothing_left(config, saved)
    if not finished:
        expected = _estimated(plan, {}, done)
        if isinstance(expected, str):
            lines["estimate"] = expected
        else:
            left = f" for {counted(config.rounds - done, 'round')} more" if done else ""
            each = f"{expected.round:.2g} s per round, {expected.scores:.2g} s for scores"
            about = f"about {_span(expected.total)}{left} ({each}), from a probe of two clients"
            lines["estimate"] = about + _without(unmeasured(plan))
    return "\n".join([run_summary(plan), *(f"{name:>10}  {text}" for name, text in lines.items())])


def sweep_text(space: Space, configs: Sequence[Config]) -> str:
    """Return the configurations of `space`, what each reserves, and how long all that are left will take."""
    check_sweep(config.placement for config in configs)
    plan = plan_sweep(space, configs)
    number, jobs = len(configs) // len(space.seeds), {job["trial"] for job in plan.jobs}
    trees = [dict(flattened(config.tree())) for config in configs[:number]]
    varied, populations = _varied(trees), Populations(keep_all=True)
    probes, estimates = dict[str, Probe | str](), dict[str, Estimate | str]()
    rows, seconds, unknown, left_out = [], [], 0, dict[str, None]()
    for position, tree in enumerate(trees):
        config, same = configs[position], configs[position::number]
        trials = len(same) if len(jobs) == len(configs) else sum(trial_name(other) in jobs for other in same)
        if (kind := plan_kind(config)) not in estimates:
            planned = populations.plan(config, Given())
            estimates[kind] = _estimated(planned, probes)
            left_out |= dict.fromkeys(unmeasured(planned))
        expected = estimates[kind]
        if isinstance(expected, str):
            unknown += 1
        else:
            seconds += [expected.total] * (1 if space.adaptive else trials)
        values = " ".join(f"{key.removeprefix('algorithm.')}={tree[key]}" for key in varied if key in tree)
        each = expected if isinstance(expected, str) else _span(expected.total)
        of_row = "corner" if space.adaptive else str(trials)
        rows.append([config.algorithm_name, values, of_row, _reserved(config.placement), each])
    to_run = len(plan.jobs)
    if space.adaptive:  # the rows are the corners of the space
        to_run = space.searched_trials
        seconds = [sum(seconds) / max(len(seconds), 1)] * to_run
    together = _trials_at_once(space, configs[:number])
    joins = "one after another, or as many at once as the running cluster has room for"
    about = f"{together} at once: about" if together else f"{joins}: at most"
    total = max(sum(seconds) / (together or 1), max(seconds, default=0.0))
    more = f"; without {counted(unknown, 'configuration')} of unknown length" if unknown else ""
    shown = [*rows[:_ROWS], *([["…", f"{len(rows) - _ROWS} more", *[""] * 3]] if len(rows) > _ROWS else [])]
    head = ["algorithm", "varies", "trials", "needs", "each"]
    columns = dict(zip(head, zip(*shown, strict=True), strict=True))
    table = plain_table(columns, left=head, width=shutil.get_terminal_size((100, 24)).columns)
    end = f"{counted(to_run, 'trial')} to run, {about} {_span(total)}{more}{_without(left_out)}"
    return "\n".join([plan.summary(), "", table, "", end])


def probe(plan: Plan, device: str | torch.device = "cpu") -> Probe:
    """Run one or two short rounds of `plan` with two clients, cut to a few batches, and measure the last round.

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
    is_cold = torch.device(device).type == "cuda"  # the first round loads kernels, which takes seconds
    began = time.monotonic()
    with torch_state_kept():
        fleet = LocalFleet(blueprint, population, device)
        try:
            for record in Server(blueprint, population, fleet, evaluation, device).run():
                seconds = record.seconds
                is_late = not is_cold and time.monotonic() - began > _PATIENCE
                if record.round == 2 or (record.stage == "round" and is_late):
                    break
        finally:
            fleet.close()
    step = (seconds["total"] - seconds["evaluate"]) / max(round(_steps(small, "round") * number), 1)
    return Probe(step, seconds["evaluate"] / max(_scored(small), 1.0))


def estimate(plan: Plan, measured: Probe, *, done: int = 0) -> Estimate:
    """Return the expected seconds of the trial of `plan`, from the probe of a plan with the same model and method.

    Hosts are assumed to share the work evenly, and hosts on one GPU to be as fast as one host. Metrics of
    representations and gradients are left out.

    Args:
        plan: The trial.
        measured: What the probe measured.
        done: The rounds that are done already. With any of them, the setup is done as well.
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


def unmeasured(plan: Plan) -> list[str]:
    """Return the metrics of a plan whose time is in no estimate."""
    return [name for name, metric in plan.evaluation.metrics.items() if isinstance(metric, _NOT_MEASURED)]


def _estimated(plan: Plan, probes: dict[str, Probe | str], done: int = 0) -> Estimate | str:
    """Return the estimate after `done` rounds, or why there is none; similar configurations share a probe."""
    key = _probe_key(plan.config.tree())
    if key not in probes:
        try:
            probes[key] = probe(plan, device_for(plan.config.placement.gpus, plan.blueprint.model))
        except Exception as error:  # for example of a method that needs more than two clients
            first = (str(error).strip().splitlines() or [""])[0]
            probes[key] = f"unknown ({type(error).__name__}: {first[:60]})"
    measured = probes[key]
    return measured if isinstance(measured, str) else estimate(plan, measured, done=done)


def _probe_key(values: Mapping[str, Any]) -> str:
    """Return a text that is the same for configurations whose steps take the same time."""
    local = {key: value for key, value in values["local"].items() if key in ("batch_size", "optimizer")}
    algorithm = values["algorithm"]["name"], values["algorithm"].get("base")
    kinds = [values[key] for key in ("data", "partition", "model", "augment", "leave_out", "batch_norm")]
    return repr((algorithm, kinds, local, sorted(values["placement"].items()), values["metrics"]))


def _steps(plan: Plan, stage: Stage) -> float:
    """Return the mean number of steps of a client in all exchanges of a stage; at least 1 for each exchange."""
    cohort = tuple(map(ClientIndex, range(plan.blueprint.cohort)))
    ctx = plan.blueprint.context(plan.population, "cpu").at(cohort=cohort)
    sizes, counts = np.unique(plan.population.participants.train_sizes(), return_counts=True)
    total = 0.0
    for k, exchange in enumerate(plan.blueprint.algorithm.exchanges(stage)):
        clients = [ctx.at(Moment(stage, 1, k), client=0, examples=size) for size in sizes.tolist()]
        steps = [steps_of(exchange, client, drop_last=plan.blueprint.drop_last) for client in clients]
        total += max(1.0, float(np.average(steps, weights=counts)))
    return total


def _scored(plan: Plan, share: float = 1.0) -> float:
    """Return the number of examples in one evaluation of a share of the participants."""
    columns = [SPLITS.index(split) for split in plan.evaluation.splits if split in SPLITS]
    examples = int(plan.population.participants.sizes[:, columns].sum())
    tests = sum(len(test.examples) for test in plan.population.tests)
    if tests and plan.blueprint.global_model(plan.population)[0] is None:  # then each client's model is scored
        foreign = sum(len(test.examples) for test in plan.population.tests if test.split == "ood")
        tests = round(foreign * share * len(plan.population.participants))
    return examples * share * len(plan.evaluation.points) + tests


def _without(metrics: Collection[str]) -> str:
    return f", without {', '.join(f'metrics.{name}' for name in metrics)}" if metrics else ""


def _span(seconds: float) -> str:
    return span(max(seconds, 1.0))  # an estimate below a second would look too exact


def _reserved(placement: Placement) -> str:
    needed = [bundle for bundle in bundles(placement) if bundle]
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in total.items() if amount)
    return f"{amounts or 'no reservation'} ({placement.description})"


def _trials_at_once(space: Space, configs: Sequence[Config]) -> int | None:
    """Return how many trials run at once on the idle machine or cluster; None if a cluster has to be joined first."""
    nodes = known_nodes()
    limit = min(space.search.max_concurrent or _AT_ONCE, _AT_ONCE)
    if nodes is None:
        return 1 if limit == 1 else None
    needs = [bundles(config.placement) for config in configs]
    largest = max(needs, key=lambda needed: sum(bundle.get("CPU", 0) + 100 * bundle.get("GPU", 0) for bundle in needed))
    return max((count for count in range(1, limit + 1) if fits(largest * count, nodes)), default=1)


def _varied(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configurations that have them."""
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: {repr(tree[key]) for tree in trees if key in tree} for key in keys}
    return [key for key, found in values.items() if len(found) > 1 and key not in ("seed", "algorithm.name")]
