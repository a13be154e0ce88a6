"""The comparison of methods in pairs, and its table."""

import csv
import itertools
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.terminal import plain_table
from rayfed.records.metric_names import is_fraction
from rayfed.reports.captions import RULE_CAPTIONS, average_words
from rayfed.reports.comparison import Comparison, Side, compare, find_group, holm, p_value_text, sides_of, stars
from rayfed.reports.read import Tables, picked_values
from rayfed.reports.selection import TRIAL
from rayfed.reports.summary import Summary, seed_values, summarise
from rayfed.reports.tables import Stars, markdown_columns
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
    """Comparisons of pairs of methods.

    Attributes:
        scores: what the methods are compared by.
        comparisons: a comparison per pair; where all pairs are compared, the better method is second.
        orders: the `order` of the first and of the second method of each comparison.
        holm_t, holm_wilcoxon: the p-values after Holm's correction.
        notes: sentences on pairs that are missing and seeds that are left out.
        best: the `order` and the name of the best method; None if only one pair was compared.
        methods: the algorithm and the hyperparameters by `order`; empty if only one pair was compared.
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
    """Return what the methods in `tables` are compared by; `summary` is that of `tables`, if the caller has it.

    Raises:
        UsageError: several experiments, or no such values.
    """
    if len(experiments := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    done = tables.done
    all_rows = (summary or summarise(tables)).rows
    # hyperparameters may be chosen at one point and not at another; the point that is shown counts
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

    Of a method with several hyperparameters, those that validation chose are compared, or all if it chose none.

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
    methods = {int(row.order): (str(row.algorithm), str(row.hyperparameters)) for row in groups.itertuples()}
    names = [algorithm for algorithm, _ in methods.values()]
    labels = {
        order: " ".join(filter(None, method)) if names.count(method[0]) > 1 else method[0]
        for order, method in methods.items()
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
    return Pairs(scores, comparisons, orders, holm_t, holm_wilcoxon, notes, (best, labels[best]), methods)


def stars_against_best(pairs: Pairs) -> Stars:
    """Return the stars of each method for its difference from the best method, if all pairs were compared."""
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
    """Return a note on each pair with seeds that only one side has."""
    return sorted(
        f"{pair.second} − {pair.first}: only the seeds that both have count; left out: "
        f"{', '.join(map(str, pair.left_out))}."
        for pair in comparisons
        if pair.left_out
    )


def pairs_table(pairs: Pairs, *, width: int, format: str = "text") -> str:
    """Return a table of pairs of methods: differences, effect sizes, and p-values with Holm's correction."""
    scores = pairs.scores
    what = f"{scores.split} {scores.metric}{', percentage points' if is_fraction(scores.metric) else ''}"
    title = f"{scores.experiment}: {'one pair' if pairs.best is None else 'all pairs'}, {what}, {scores.caption}"
    columns, notes = pairs_columns(pairs), pairs_notes(pairs)
    if format == "csv":
        text: str = pd.DataFrame(columns).to_csv(index=False, quoting=csv.QUOTE_ALL)
        return text.rstrip("\n")
    if format == "markdown":
        escaped = {name: [cell.replace("*", "\\*") for cell in cells] for name, cells in columns.items()}
        return "\n\n".join([title, markdown_columns(escaped), *(note.replace("*", "\\*") for note in notes)])
    table = plain_table(columns, left=("difference of",), width=width)
    text = "\n\n".join([textwrap.fill(title, width), table, textwrap.fill(" ".join(notes), width)])
    return textwrap.indent(text, "% ") if format == "latex" else text  # in LaTeX, a comment


def pairs_columns(pairs: Pairs) -> dict[str, list[str]]:
    """Return the columns of the table of pairs as text."""
    scale, decimals = _scale(pairs.scores.metric)
    names = ("difference of", "mean", "95 % interval", "d_z", "wins", "p (t)", "p (Wilcoxon)", "")
    rows = []
    for pair, p_t, p_wilcoxon in zip(pairs.comparisons, pairs.holm_t, pairs.holm_wilcoxon, strict=True):
        low, high, mean = (f"{x * scale:+.{decimals}f}" for x in (pair.low, pair.high, pair.difference))
        effect = "-" if pair.effect != pair.effect else f"{pair.effect:+.2f}"
        wins, tests = f"{pair.wins} of {len(pair.pairs)}", (p_value_text(p_t), p_value_text(p_wilcoxon), stars(p_t))
        rows.append((f"{pair.second} − {pair.first}", mean, f"{low} to {high}", effect, wins, *tests))
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def pairs_notes(pairs: Pairs) -> list[str]:
    """Return the notes below the table of pairs: what its columns mean, and what limits the tests."""
    over = " or ".join(sorted({pair.over for pair in pairs.comparisons}, reverse=True))
    count, least = len(pairs.comparisons), min(len(pair.pairs) for pair in pairs.comparisons)
    corrected, before = (f", Holm-corrected for {count} pairs", " before the correction") if count > 1 else ("", "")
    notes = [
        f"Paired over {over}. p: two-sided{corrected}; *, **, ***: the t test is below 0.05, 0.01, 0.001. d_z: mean "
        "difference divided by its standard deviation. wins: pairs in which the first named has the greater value."
    ]
    if "clients" in over:
        notes.append("Where only one seed is common, the pairs are its clients, which do not cover other seeds.")
    if (p := 2.0 ** (1 - least)) * count >= 0.05:
        notes.append(f"With {least} pairs, Wilcoxon's p is at least {p:.2g}{before}.")
    if count == 1:
        (pair,), (scale, decimals) = pairs.comparisons, _scale(pairs.scores.metric)
        differences = zip(pair.pairs, pair.differences, strict=True)
        each = ", ".join(f"{difference * scale:+.{decimals}f} ({number})" for number, difference in differences)
        notes.append(f"Differences by {pair.over[:-1]}: {each}.")
    return [*notes, *pairs.notes]


def _scale(metric: str) -> tuple[int, int]:
    """Return the factor and the decimals with which differences of a metric are shown."""
    return (100, 2) if is_fraction(metric) else (1, 4)
