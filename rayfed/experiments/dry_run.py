"""The texts of `--dry-run`: what would run, what each trial needs, and about how long it takes."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from rayfed.core.plain_table import plain_table
from rayfed.engine.checkpoint import Saved, newest_round
from rayfed.engine.device import device_for
from rayfed.experiments.capacity import Bundle, bundles, check_run, check_sweep, fits, known_nodes
from rayfed.experiments.config import Config, Placement
from rayfed.experiments.forecast import Estimate, Probe, estimate, needs_of, probe, probe_key
from rayfed.experiments.naming import trial_name
from rayfed.experiments.plan import Given, Plan
from rayfed.experiments.progress import span
from rayfed.experiments.run_summary import counted, run_summary, size_text
from rayfed.experiments.space import Space
from rayfed.experiments.sweep import Populations, plan_sweep
from rayfed.experiments.trial import check_rounds, nothing_left, resume_message, usable
from rayfed.records.checkpoints import CheckpointStore
from rayfed.records.storage import open_storage
from rayfed.records.tracking import check_trackers
from rayfed.records.trials import flattened

_ROWS = 30  # rows of a table
_AT_ONCE = 64  # the most trials that are counted as fitting at once


def run_text(plan: Plan) -> str:
    """Return what `plan` is, what it needs, and how long it will take."""
    check_run(plan.config.placement)
    check_trackers(vars(plan.config.tracking), plan.config.results)
    check_rounds({plan.trial: plan.config})
    start, lines = _start(plan.config, plan.trial), {"needs": f"{_reserved(plan.config.placement)}; {_held(plan)}"}
    if plan.config.resume:
        lines["resume"] = start.what or "nothing saved: starts at round 1"
    found = _estimate(plan, {}, start)
    if isinstance(found, str):
        lines["estimate"] = found
    elif not start.finished:
        each, scores = f"{found.round:.2g} s per round", f"{found.scores:.2g} s for scores"
        scores += f", {_span(found.metrics)} in all for metrics" if found.metrics >= 1 else ""
        left = f" for {counted(plan.config.rounds - start.round, 'round')} more" if start.round else ""
        lines["estimate"] = f"about {_span(found.total)}{left} ({each}, {scores}), from a probe of two clients"
    return "\n".join([run_summary(plan), *(f"{name:>10}  {text}" for name, text in lines.items())])


def sweep_text(space: Space, configs: Sequence[Config]) -> str:
    """Return the configurations of `space`, what each needs, and how long all will take."""
    check_sweep(config.placement for config in configs)
    plan = plan_sweep(space, configs, Given())
    number = len(configs) // len(space.seeds)
    starts = {job["trial"]: _start(job["config"], job["trial"]) for job in plan.jobs}
    populations, probes = Populations(keep_all=True), dict[str, Probe | str]()
    rows, seconds, unknown = [], [], 0
    trees = [dict(flattened(config.tree())) for config in configs[:number]]
    varied = _varied(trees)
    for position in range(number):
        planned = populations.plan(configs[position], Given())
        trials = [trial_name(config) for config in configs[position::number]]
        still = [starts[trial] for trial in trials if trial in starts]
        found = [_estimate(planned, probes, start) for start in still or [_Start()]]
        known = [one.total for one in found if not isinstance(one, str)]
        seconds += known if still or plan.study is not None else []
        unknown += not known
        rows.append(
            [
                planned.config.algorithm_name,
                _shown(trees[position], varied),
                "corner" if plan.study is not None else str(len(still)),
                _reserved(planned.config.placement),
                _held(planned),
                _span(max(known)) if known else str(found[0]),
            ]
        )
    if plan.study is not None:  # the rows are the corners of the space
        to_run = plan.study.total - plan.study.finished_before
        each = [one for one in seconds if one] or [0.0]
        seconds = [sum(each) / len(each)] * to_run
    else:
        to_run = len(plan.jobs)
    at_once = _at_once(space, configs[:number])
    total = max(sum(seconds) / at_once, max(seconds, default=0.0))
    more = f"; without {counted(unknown, 'configuration')} of unknown length" if unknown else ""
    shown = [*rows[:_ROWS], *([["…", f"{len(rows) - _ROWS} more", *[""] * 4]] if len(rows) > _ROWS else [])]
    head = ["algorithm", "varies", "trials", "needs", "holds", "each"]
    columns = dict(zip(head, zip(*shown, strict=True), strict=True))
    table = plain_table(columns, left=head, width=shutil.get_terminal_size((100, 24)).columns)
    end = f"{counted(to_run, 'trial')} to run, {at_once} at once: about {_span(total)}{more}"
    saved = [f"{trial} {start.what}" for trial, start in starts.items() if start.what]
    more_saved = [f"… {len(saved) - _ROWS} more"] if len(saved) > _ROWS else []
    return "\n".join([plan.summary(), "", table, "", *saved[:_ROWS], *more_saved, end])


class _Start(NamedTuple):
    """Where a trial is going to start: after which round, what that means in words, and whether nothing is left."""

    round: int = 0
    what: str = ""
    finished: bool = False


def _start(config: Config, trial: str) -> _Start:
    saved: Saved = ()
    if config.resume:
        saved = usable(config, CheckpointStore(open_storage(config.results).child(config.experiment), trial).saved())
    if not saved:
        return _Start()
    round = min(newest_round(saved) or 0, config.rounds)
    return _Start(round, resume_message(config, saved), nothing_left(config, saved))


def _estimate(plan: Plan, probes: dict[str, Probe | str], start: _Start) -> Estimate | str:
    """Return the expected seconds after `start`, or why they are not known; similar configurations share a probe."""
    key = probe_key(plan.config.tree())
    if key not in probes:
        try:
            probes[key] = probe(plan, device_for(plan.config.placement.gpus))
        except Exception as error:  # such as a method that cannot do with two clients
            first = (str(error).strip().splitlines() or [""])[0]
            probes[key] = f"unknown ({type(error).__name__}: {first[:60]})"
    measured = probes[key]
    if isinstance(measured, str):
        return measured
    found = estimate(plan, measured, done=start.round)
    return replace(found, total=0.0) if start.finished else found


def _span(seconds: float) -> str:
    return span(max(seconds, 1.0))  # an estimate below a second would only look exact


def _reserved(placement: Placement) -> str:
    needed = [bundle for bundle in bundles(placement) if bundle]
    total = {name: sum(bundle.get(name, 0.0) for bundle in needed) for name in ("CPU", "GPU")}
    amounts = ", ".join(f"{amount:g} {name}" for name, amount in total.items() if amount)
    return f"{amounts or 'no reservation'} ({placement.description})"


def _held(plan: Plan) -> str:
    needs = needs_of(plan)
    states = f", clients {size_text(needs.clients)}" if needs.clients else ""
    return f"data {size_text(needs.data)}, server {size_text(needs.server)}{states}"


def _at_once(space: Space, configs: Sequence[Config]) -> int:
    """Return how many trials run at once on the machine or cluster, idle; 1 if a cluster has to be joined first."""
    nodes = known_nodes()
    limit = min(space.search.max_concurrent or _AT_ONCE, _AT_ONCE)
    if nodes is None:
        return limit if space.search.max_concurrent else 1
    largest: list[Bundle] = max(
        (bundles(config.placement) for config in configs),
        key=lambda needed: sum(bundle.get("CPU", 0) + 100 * bundle.get("GPU", 0) for bundle in needed),
    )
    return max((count for count in range(1, limit + 1) if fits(largest * count, nodes)), default=1)


def _shown(values: Mapping[str, Any], varied: Sequence[str]) -> str:
    return " ".join(f"{key.removeprefix('algorithm.')}={values[key]}" for key in varied if key in values)


def _varied(trees: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys whose values differ between configurations that have them."""
    keys = dict.fromkeys(key for tree in trees for key in tree)
    values = {key: {repr(tree[key]) for tree in trees if key in tree} for key in keys}
    return [key for key, found in values.items() if len(found) > 1 and key not in ("seed", "algorithm.name")]
