"""The values that are compared in pairs, and the comparison of pairs of methods."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.reports.captions import RULE_CAPTIONS, average_words
from rayfed.reports.comparison import Comparison, Side, compare, find_group, sides_of
from rayfed.reports.read import Tables
from rayfed.reports.result_table import Stars
from rayfed.reports.selection import TRIAL
from rayfed.reports.significance import holm, p_value_text, stars
from rayfed.reports.summary import Summary, seed_values, summarise
from rayfed.reports.trial_scores import picked_values
from rayfed.reports.view import View, filter_rows

_GROUP = ["algorithm", "hyperparameters", "order"]


class PairedScores(NamedTuple):
    """What the methods of one experiment are compared by.

    Attributes:
        experiment: its name.
        values: columns order, seed, quantity ("mean", "client:I", ...), value, higher_is_better.
        groups: a row per method with its hyperparameters: algorithm, hyperparameters, order, chosen.
        trials: the trials that count, with their configuration and `order`.
        split, metric: the split and the metric.
        rule: the rule that picks the round.
        caption: what the values are means over, and the rule, in words.
    """

    experiment: str
    values: pd.DataFrame
    groups: pd.DataFrame
    trials: pd.DataFrame
    split: str
    metric: str
    rule: str
    caption: str


class Pairs(NamedTuple):
    """Pairs of methods.

    Attributes:
        scores: what they are compared by.
        comparisons: one per pair; of all pairs, the better method is second.
        orders: of each comparison, the `order` of its first and its second.
        holm_t, holm_wilcoxon: the p-values after Holm's correction.
        notes: sentences on pairs that are missing and seeds that are left out.
        best: the `order` of the best method, and its name; None if not all methods were compared.
        methods: the algorithm and the hyperparameters by `order`, likewise.
    """

    scores: PairedScores
    comparisons: list[Comparison]
    orders: list[tuple[int, int]]
    holm_t: list[float]
    holm_wilcoxon: list[float]
    notes: list[str]
    best: tuple[int, str] | None = None
    methods: Mapping[int, tuple[str, str]] = MappingProxyType({})


def paired_scores(tables: Tables, view: View, summary: Summary | None = None) -> PairedScores:
    """Return what the methods in `tables`, of one experiment, are compared by.

    Args:
        tables: The tables of one experiment.
        view: What to compare.
        summary: that of `tables`, if the caller has it.

    Raises:
        UsageError: several experiments, or no such values.
    """
    if len(experiments := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    done = tables.done
    all_rows = (summary or summarise(tables)).rows
    # hyperparameters may be chosen at one point and not at another; what counts is the point that is shown
    shown = filter_rows(all_rows, tables, view)
    split, metric = str(shown["split"].iloc[0]), str(shown["metric"].iloc[0])
    rows = picked_values(tables.scores, done, metric, split, tables.criteria).merge(done[[*TRIAL, *_GROUP]], on=TRIAL)
    rows = filter_rows(rows, tables, replace(view, metric=metric, split=split))
    groups = pd.concat([shown, all_rows.assign(chosen=False)])[[*_GROUP, "chosen"]].drop_duplicates("order")
    trials_by_rule = rows.groupby("rule")["trial"].agg(set)
    rule = view.rule or ("selected" if trials_by_rule.get("selected") == trials_by_rule.get("final") else "final")
    rows = rows[rows["rule"] == rule]
    keys = ["metric", "higher_is_better", "quantity"]
    average = average_words(tables.counts, tables.trials, split, metric)
    return PairedScores(
        experiment=experiments[0],
        values=seed_values(rows[[*TRIAL, *keys, "value"]], done, keys),
        groups=groups.sort_values("order", ignore_index=True),
        trials=tables.trials.merge(done[[*TRIAL, "order"]], on=TRIAL),
        split=split,
        metric=metric,
        rule=rule,
        caption=f"{average}, {RULE_CAPTIONS[rule].format(criterion=tables.criteria[experiments[0]])}",
    )


def one_pair(scores: PairedScores, names: tuple[str, str]) -> Pairs:
    """Return the comparison of the second of `names` with the first.

    Raises:
        UsageError: a name that is not in the results, or trials that cannot be paired.
    """
    first, second = (find_group(name, scores.groups) for name in names)
    if first == second:
        raise UsageError(f"compare: {names[0]} and {names[1]} are the same algorithm and hyperparameters")
    sides = sides_of(scores.values, scores.trials, {first: names[0], second: names[1]})
    comparison = _compared(scores, sides[first], sides[second])
    p_values = [comparison.p_t], [comparison.p_wilcoxon]
    return Pairs(scores, [comparison], [(first, second)], *p_values, _left_out([comparison]))


def all_pairs(scores: PairedScores) -> Pairs:
    """Return the comparison of all pairs of methods.

    A method with several hyperparameters stands for those that validation chose, or if it chose none, for each of them.

    Raises:
        UsageError: fewer than two methods, or none that can be paired.
    """
    groups = scores.groups[scores.groups["order"].isin(scores.values["order"])]
    has_choice = groups.groupby("algorithm")["chosen"].transform("any")
    groups = groups[groups["chosen"] | ~has_choice]
    if len(groups) < 2:
        raise UsageError("compare: needs two methods or more with finished trials")
    means = scores.values[scores.values["quantity"] == "mean"].groupby("order")["value"].mean()
    ascending = bool(scores.values["higher_is_better"].iloc[0])
    ranked = groups.assign(mean=groups["order"].map(means)).sort_values("mean", ascending=ascending, kind="stable")
    several = groups.groupby("algorithm")["order"].transform("size") > 1
    labels = {
        int(row.order): f"{row.algorithm} {row.hyperparameters}" if many and row.hyperparameters else str(row.algorithm)
        for row, many in zip(groups.itertuples(), several, strict=True)
    }
    sides = sides_of(scores.values, scores.trials, labels)
    comparisons, orders, notes = [], [], []
    for first, second in itertools.combinations([int(order) for order in ranked["order"]], 2):
        try:
            comparison = _compared(scores, sides[first], sides[second])
        except UsageError as error:
            notes.append(f"{labels[second]} − {labels[first]} is missing: {str(error).removeprefix('compare: ')}.")
            continue
        comparisons.append(comparison)
        orders.append((first, second))
    if not comparisons:
        raise UsageError(f"compare: no two methods can be paired; {notes[0]}")
    notes += _left_out(comparisons)
    holm_t, holm_wilcoxon = (holm([getattr(pair, name) for pair in comparisons]) for name in ("p_t", "p_wilcoxon"))
    best = int(ranked["order"].iloc[-1])
    methods = {int(row.order): (str(row.algorithm), str(row.hyperparameters)) for row in groups.itertuples()}
    return Pairs(scores, comparisons, orders, holm_t, holm_wilcoxon, notes, (best, labels[best]), methods)


def stars_against_best(pairs: Pairs) -> Stars:
    """Return the stars of each method for its difference from the best one, where all were compared."""
    if pairs.best is None:
        return Stars()
    tested = zip(pairs.orders, pairs.holm_t, strict=True)
    p_values = {pairs.methods[first]: p for (first, second), p in tested if second == pairs.best[0]}
    marks = {method: stars(p) for method, p in p_values.items()}
    return Stars(pairs.best[1], marks, {method: p_value_text(p) for method, p in p_values.items()})


def _compared(scores: PairedScores, first: Side, second: Side) -> Comparison:
    if not (first.values and second.values):
        raise UsageError(
            f"compare: rule={scores.rule}: one side has no {scores.split} {scores.metric} under this rule; use final"
        )
    return compare(first, second)


def _left_out(comparisons: list[Comparison]) -> list[str]:
    """Return a note on the seeds that do not count, since a side of a pair lacks them."""
    notes = {
        f"{pair.second} − {pair.first}: only the seeds that both have count; left out: "
        f"{', '.join(map(str, pair.left_out))}."
        for pair in comparisons
        if pair.left_out
    }
    return sorted(notes)
