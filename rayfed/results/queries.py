"""Answers to questions of the reader: when a target is reached, and whether one method is better than another."""

import textwrap

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.results.common_rounds import scored_clients_notes
from rayfed.results.comparison import Comparison, check_paired, compare, find_group
from rayfed.results.metric_names import is_fraction
from rayfed.results.read import Tables
from rayfed.results.report import RULE_CAPTIONS
from rayfed.results.row_filter import filter_rows
from rayfed.results.selection import TRIAL, aggregate_clients, client_values, pick_rounds
from rayfed.results.summary import countable_trials, seed_values, selection_criterion, summarise
from rayfed.results.target import check_target, rounds_to_target, target_table

_GROUP = ["algorithm", "hyperparameters", "order"]


def target_text(tables: Tables, target: float, *, metric: str, point: str | None, split: str | None, width: int) -> str:
    """Return a table of the rounds and gigabytes until the mean over clients reaches `target`.

    Args:
        metric, point, split, width: as in `render`.

    Raises:
        UsageError: a target that the metric cannot have, or no such values.
    """
    check_target(target, metric)
    done, _ = countable_trials(tables)
    curves = aggregate_clients(tables.metrics.merge(done[TRIAL], on=TRIAL))
    means = curves[curves["quantity"] == "mean"].merge(done[[*TRIAL, *_GROUP]], on=TRIAL)
    means = filter_rows(means, tables, metric=metric, point=point, split=split)
    parts = []
    for experiment, rows in means.groupby("experiment"):
        side = "at least" if rows["higher_is_better"].iloc[0] else "at most"
        title = (
            f"{experiment}: first evaluated round whose {rows['split'].iloc[0]} {metric}, mean over clients, is {side} "
            f"{target:g}, and GB (10⁹ bytes, down and up, including the setup) sent until its end; mean ± sd over the "
            "runs that reached it"
        )
        table = target_table(rounds_to_target(rows, tables, target), done, width=width)
        parts += [textwrap.fill(title, width), table]
    parts += [textwrap.fill(note, width) for note in scored_clients_notes(tables.metrics, means)]
    return "\n\n".join(parts)


def comparison_text(
    tables: Tables,
    names: tuple[str, str],
    *,
    metric: str,
    point: str | None,
    split: str | None,
    rule: str | None,
    width: int,
) -> str:
    """Return the mean difference of the second of `names` from the first, over pairs, with its confidence interval.

    Args:
        names: two algorithms, or algorithms with their hyperparameters as the table shows them.
        metric, point, split, rule, width: as in `render`.

    Raises:
        UsageError: a name that is not in the results, or trials that cannot be paired.
    """
    if len(experiments := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    done, _ = countable_trials(tables)
    metrics = tables.metrics.merge(done[TRIAL], on=TRIAL)
    curves = pd.concat([aggregate_clients(metrics), client_values(metrics)], ignore_index=True)
    rows = pick_rounds(curves).merge(done[[*TRIAL, *_GROUP]], on=TRIAL)
    rows = filter_rows(rows, tables, metric=metric, point=point, split=split)
    split = str(rows["split"].iloc[0])
    summary = summarise(tables).rows
    # hyperparameters may be chosen at one point and not at another; what counts is the point that is shown
    shown = filter_rows(summary, tables, metric=metric, point=point, split=split)
    groups = pd.concat([shown, summary.assign(chosen=False)])[[*_GROUP, "chosen"]]
    orders = [find_group(name, groups) for name in names]
    if orders[0] == orders[1]:
        raise UsageError(f"compare: {names[0]} and {names[1]} are the same algorithm and hyperparameters")
    sides = {order: side for side, order in enumerate(orders)}
    trials = tables.trials.merge(done[[*TRIAL, "order"]], on=TRIAL)
    check_paired(trials[trials["order"].isin(orders)].assign(side=lambda frame: frame["order"].map(sides)), names)
    rows = rows[rows["order"].isin(orders)]
    trials_by_rule = rows.groupby("rule")["trial"].agg(set)
    rule = rule or ("selected" if trials_by_rule.get("selected") == trials_by_rule.get("final") else "final")
    rows = rows[rows["rule"] == rule]
    keys = ["metric", "higher_is_better", "quantity"]
    values = seed_values(rows[[*TRIAL, *keys, "value"]], done, keys)
    values = values.assign(side=values["order"].map(sides))
    if set(values["side"]) != {0, 1}:
        raise UsageError(f"compare: rule={rule}: one side has no {split} {metric} under this rule; use final")
    caption = RULE_CAPTIONS[rule].format(criterion=selection_criterion(summary))
    return textwrap.fill(_sentence(compare(values, names), metric, split, caption), width)


def _sentence(result: Comparison, metric: str, split: str, rule: str) -> str:
    scale, unit, decimals = (100, ", percentage points", 2) if is_fraction(metric) else (1, "", 4)
    differences = ", ".join(
        f"{difference * scale:+.{decimals}f} ({pair})"
        for pair, difference in zip(result.pairs, result.differences, strict=True)
    )
    count = len(result.pairs)
    if result.over == "seeds":
        over = f"paired t over {count} seeds"
    else:
        over = f"paired t over the {count} clients of one seed, which does not cover other seeds"
    low, high, mean = (f"{x * scale:+.{decimals}f}" for x in (result.low, result.high, result.difference))
    return (
        f"{result.second} − {result.first}, {split} {metric}{unit}, mean over clients, {rule}: {mean}, 95 % confidence "
        f"interval {low} to {high} ({over}). Differences by {result.over[:-1]}: {differences}."
    )
