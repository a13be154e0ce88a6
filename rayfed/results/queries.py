"""What the report answers when asked: how soon a target is reached, and whether one setting is better than another."""

import textwrap

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.results.common_rounds import clients_differ
from rayfed.results.comparison import Comparison, check_paired, compare, find
from rayfed.results.metric_names import is_share, lower_is_better
from rayfed.results.read import Tables
from rayfed.results.row_filter import wanted
from rayfed.results.selection import TRIAL, by_round, of_clients, picked
from rayfed.results.summary import counted, criterion, of_seeds, summarise
from rayfed.results.target import check_target, reached, target_table

_SETTING = ["algorithm", "setting", "order"]


def target_text(tables: Tables, target: float, *, metric: str, point: str | None, split: str | None, width: int) -> str:
    """Rounds and gigabytes until the mean over clients reaches `target`, a line a setting."""
    check_target(target, metric)
    done, _ = counted(tables)
    curves = by_round(tables.metrics.merge(done[TRIAL], on=TRIAL))
    means = curves[curves["quantity"] == "mean"].merge(done[[*TRIAL, *_SETTING]], on=TRIAL)
    means = wanted(means, tables, metric=metric, point=point, split=split)
    side = "at most" if lower_is_better(metric) else "at least"
    parts = []
    for experiment, rows in means.groupby("experiment"):
        there = rows["split"].iloc[0]
        title = (
            f"{experiment}: first evaluated round whose {there} {metric}, mean over clients, is {side} {target:g}, and "
            "GB (10⁹ bytes, down and up, setup included) sent until its end; mean ± sd over the runs that reached it"
        )
        parts += [textwrap.fill(title, width), target_table(reached(rows, tables, target), done, width=width)]
    parts += [textwrap.fill(note, width) for note in clients_differ(tables.metrics, means)]
    return "\n\n".join(parts)


def comparison_text(
    tables: Tables,
    names: tuple[str, str],
    *,
    metric: str,
    point: str | None,
    split: str | None,
    rule: str | None,
    rule_words: dict[str, str],
    width: int,
) -> str:
    """The second of `names` against the first: the mean difference over pairs, and its 95 % confidence interval."""
    if len(experiments := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    done, _ = counted(tables)
    metrics = tables.metrics.merge(done[TRIAL], on=TRIAL)
    curves = pd.concat([by_round(metrics), of_clients(metrics)], ignore_index=True)
    rows = picked(curves).merge(done[[*TRIAL, *_SETTING]], on=TRIAL)
    rows = wanted(rows, tables, metric=metric, point=point, split=split)
    split = str(rows["split"].iloc[0])
    summary = summarise(tables).rows
    # a setting may be chosen at one point and not at another: here it is at the point that is asked for
    shown = wanted(summary, tables, metric=metric, point=point, split=split)
    known = pd.concat([shown, summary.assign(chosen=False)])[[*_SETTING, "chosen"]]
    orders = [find(name, known) for name in names]
    if orders[0] == orders[1]:
        raise UsageError(f"compare: {names[0]} and {names[1]} are the same setting")
    sides = {order: side for side, order in enumerate(orders)}
    trials = tables.trials.merge(done[[*TRIAL, "order"]], on=TRIAL)
    check_paired(trials[trials["order"].isin(orders)].assign(side=lambda frame: frame["order"].map(sides)), names)
    rows = rows[rows["order"].isin(orders)]
    trials_with = rows.groupby("rule")["trial"].agg(set)
    rule = rule or ("selected" if trials_with.get("selected") == trials_with.get("final") else "final")
    rows = rows[rows["rule"] == rule]
    values = of_seeds(rows[[*TRIAL, "metric", "quantity", "value"]], done, ["metric", "quantity"]).assign(
        side=lambda frame: frame["order"].map(sides)
    )
    if set(values["side"]) != {0, 1}:
        raise UsageError(f"compare: rule={rule}: a side has no {split} {metric} under it; use final")
    words = rule_words[rule].format(criterion=criterion(summary))
    return textwrap.fill(_said(compare(values, names), metric, split, words), width)


def _said(found: Comparison, metric: str, split: str, rule: str) -> str:
    scale, unit = (100, ", percentage points") if is_share(metric) else (1, "")
    places = 2 if scale == 100 else 4
    each = ", ".join(f"{d * scale:+.{places}f} ({p})" for p, d in zip(found.pairs, found.differences, strict=True))
    count = len(found.pairs)
    if found.over == "seeds":
        over = f"paired t over {count} seeds"
    else:
        over = f"paired t over the {count} clients of one seed, which says nothing of other seeds"
    low, high, mean = (f"{x * scale:+.{places}f}" for x in (found.low, found.high, found.difference))
    return (
        f"{found.second} − {found.first}, {split} {metric}{unit}, mean over clients, {rule}: {mean}, 95 % confidence "
        f"interval {low} to {high} ({over}). Differences by {found.over[:-1]}: {each}."
    )
