"""The texts of `--dry-run`: what would run, what each trial reserves, and about how long it takes."""

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rayfed.core.terminal import plain_table
from rayfed.engine.checkpoint import newest_round
from rayfed.engine.device import device_for
from rayfed.experiments.capacity import Bundle, bundles, check_run, check_sweep, fits, gpu_picture, known_nodes
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.forecast import Estimate, Probe, estimate, probe, probe_key, unmeasured
from rayfed.experiments.naming import trial_name
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.progress import span
from rayfed.experiments.run_summary import counted, run_summary
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import Populations, plan_kind, plan_sweep
from rayfed.experiments.trial import check_rounds, nothing_left, resume_message, usable
from rayfed.records.checkpoints import CheckpointStore
from rayfed.records.storage import open_storage
from rayfed.records.trackers import check_trackers
from rayfed.records.trials import flattened

_ROWS = 30  # rows of a table
_AT_ONCE = 64  # the most trials that are counted as fitting at once


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
        expected = _estimate(plan, {}, done)
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
    plan = plan_sweep(space, configs, Given())
    number = len(configs) // len(space.seeds)
    trees = [dict(flattened(config.tree())) for config in configs[:number]]
    varied, jobs = _varied(trees), {job["trial"] for job in plan.jobs}
    populations, probes = Populations(keep_all=True), dict[str, Probe | str]()
    estimates: dict[str, Estimate | str] = {}
    rows, seconds, unknown, left_out = [], [], 0, dict[str, None]()
    for position, tree in enumerate(trees):
        config = configs[position]
        same = configs[position::number]
        trials = len(same) if len(jobs) == len(configs) else sum(trial_name(other) in jobs for other in same)
        if (kind := plan_kind(config)) not in estimates:
            planned = populations.plan(config, Given())
            estimates[kind] = _estimate(planned, probes)
            left_out |= dict.fromkeys(unmeasured(planned))
        expected = estimates[kind]
        if isinstance(expected, str):
            unknown += 1
        else:
            seconds += [expected.total] * (1 if plan.space.adaptive else trials)
        rows.append(
            [
                config.algorithm_name,
                " ".join(f"{key.removeprefix('algorithm.')}={tree[key]}" for key in varied if key in tree),
                "corner" if plan.space.adaptive else str(trials),
                _reserved(config.placement),
                expected if isinstance(expected, str) else _span(expected.total),
            ]
        )
    to_run = len(plan.jobs)
    if plan.space.adaptive:  # the rows are the corners of the space
        to_run = plan.space.searched_trials
        seconds = [sum(seconds) / max(len(seconds), 1)] * to_run
    at_once = _at_once(space, configs[:number])
    joins = "one after another, or as many at once as the running cluster has room for"
    about = f"{at_once} at once: about" if at_once else f"{joins}: at most"
    total = max(sum(seconds) / (at_once or 1), max(seconds, default=0.0))
    more = f"; without {counted(unknown, 'configuration')} of unknown length" if unknown else ""
    shown = [*rows[:_ROWS], *([["…", f"{len(rows) - _ROWS} more", *[""] * 3]] if len(rows) > _ROWS else [])]
    head = ["algorithm", "varies", "trials", "needs", "each"]
    columns = dict(zip(head, zip(*shown, strict=True), strict=True))
    table = plain_table(columns, left=head, width=shutil.get_terminal_size((100, 24)).columns)
    end = f"{counted(to_run, 'trial')} to run, {about} {_span(total)}{more}{_without(left_out)}"
    return "\n".join([plan.summary(), "", table, "", end])


def _estimate(plan: Plan, probes: dict[str, Probe | str], done: int = 0) -> Estimate | str:
    """Return what is expected after `done` rounds, or why it is not known; similar configurations share a probe."""
    key = probe_key(plan.config.tree())
    if key not in probes:
        try:
            probes[key] = probe(plan, device_for(plan.config.placement.gpus, plan.blueprint.model))
        except Exception as error:  # such as a method that cannot do with two clients
            first = (str(error).strip().splitlines() or [""])[0]
            probes[key] = f"unknown ({type(error).__name__}: {first[:60]})"
    measured = probes[key]
    return measured if isinstance(measured, str) else estimate(plan, measured, done=done)


def _without(metrics: Sequence[str] | Mapping[str, None]) -> str:
    return f", without {', '.join(f'metrics.{name}' for name in metrics)}" if metrics else ""


def _span(seconds: float) -> str:
    return span(max(seconds, 1.0))  # an estimate below a second would only look exact


def _reserved(placement: Placement) -> str:
    needed = [bundle for bundle in bundles(placement) if bundle]
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in total.items() if amount)
    return f"{amounts or 'no reservation'} ({placement.description})"


def _at_once(space: Space, configs: Sequence[Config]) -> int | None:
    """Return how many trials run at once on the machine or cluster, idle; None if a cluster has to be joined first."""
    nodes = known_nodes()
    limit = min(space.search.max_concurrent or _AT_ONCE, _AT_ONCE)
    if nodes is None:
        return 1 if space.search.max_concurrent == 1 else None
    largest: list[Bundle] = max(
        (bundles(config.placement) for config in configs),
        key=lambda needed: sum(bundle.get("CPU", 0) + 100 * bundle.get("GPU", 0) for bundle in needed),
    )
    return max((count for count in range(1, limit + 1) if fits(largest * count, nodes)), default=1)


def _varied(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configurations that have them."""
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: {repr(tree[key]) for tree in trees if key in tree} for key in keys}
    return [key for key, found in values.items() if len(found) > 1 and key not in ("seed", "algorithm.name")]
