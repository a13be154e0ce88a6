"""Paired comparison of methods over common seeds, with tests of significance.

Sources: Wilcoxon (1945), "Individual comparisons by ranking methods"; Holm (1979), "A simple sequentially rejective
multiple test procedure"; Cohen (1988), "Statistical power analysis for the behavioral sciences", for d_z.
"""

import csv
import itertools
import math
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.records import is_fraction
from rayfed.core.terminal import plain_table
from rayfed.reports.read import Tables
from rayfed.reports.selection import LOCATION_KEYS, TRIAL, pick_rounds, scores_of
from rayfed.reports.summary import RULE_CAPTIONS, Summary, View, average_words, filter_rows, seed_values, summarise
from rayfed.reports.tables import Stars, markdown_columns

_GROUP = ["algorithm", "hyperparameters", "order"]
# The columns that decide which client holds which examples: the hash names rows of the dataset that data.* describe.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "unseen_share", "leave_out")
# The hash covers the contents of the partition file, and what the seed of the partition draws.
_NOT_PAIRED = (*LOCATION_KEYS, "partition.file", "partition.seed")
_CONFIDENCE = 0.95
_NOISE = 1e-12  # differences up to this are rounding errors of means
_LEVELS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


class Comparison(NamedTuple):
    """The second method minus the first, by seed.

    Attributes:
        first, second: The names of the methods.
        orders: The `order` of both.
        differences: The differences, with the seeds as index.
        low, high: The 95 % confidence interval of the mean difference by Student's t.
        effect: The effect size, Cohen's d_z.
        p_t, p_wilcoxon: The p-values of the paired t test and of Wilcoxon's signed-rank test, after Holm's correction.
    """

    first: str
    second: str
    orders: tuple[int, int]
    differences: pd.Series
    low: float
    high: float
    effect: float
    p_t: float
    p_wilcoxon: float

    @property
    def wins(self) -> int:
        """The number of seeds at which the second has the greater value."""
        return int((self.differences > _NOISE).sum())


class Pairs(NamedTuple):
    """The comparisons of the methods of one experiment.

    Attributes:
        experiment, split, metric: What is compared.
        caption: What the values are means over, and by which rule rounds are picked.
        comparisons: One for each pair. If all pairs are compared, the better method of a pair is second.
        notes: Sentences on pairs that are missing and seeds that are left out.
        best: The `order` of the best method; None if only one pair was compared.
    """

    experiment: str
    split: str
    metric: str
    caption: str
    comparisons: list[Comparison]
    notes: list[str]
    best: int | None


def compare(tables: Tables, view: View, names: Sequence[str] = (), summary: Summary | None = None) -> Pairs:
    """Compare all pairs of methods, or the second of two `names` with the first.

    A method with several hyperparameters takes part with those that validation chose, or with all if it chose none.

    Args:
        tables: The tables of one experiment.
        names: Two methods; see `find_group`.
        summary: The summary of `tables`, if the caller has it.

    Raises:
        UsageError: Several experiments, no values, a name that is not in the results, or no methods that can be paired.
    """
    if len(experiments := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"compare: takes one experiment; choose with --experiment: {', '.join(experiments)}")
    rows = (summary or summarise(tables)).rows
    # hyperparameters may be chosen at one point and not at another; the shown point counts
    shown = filter_rows(rows, tables, view)
    split, metric = str(shown["split"].iloc[0]), str(shown["metric"].iloc[0])
    values, rule = _values(tables, replace(view, metric=metric, split=split))
    groups = pd.concat([shown, rows.assign(chosen=False)])[[*_GROUP, "chosen"]].drop_duplicates("order")
    groups = groups.sort_values("order", ignore_index=True)
    if names:
        first, second = (find_group(name, groups) for name in names)
        pairs, labels, best = [(first, second)], {first: names[0], second: names[1]}, None
    else:
        labels = _chosen_methods(groups[groups["order"].isin(values.columns)])
        ascending = bool(shown["higher_is_better"].iloc[0])
        ranked = values[list(labels)].mean().sort_values(ascending=ascending, kind="stable").index.tolist()
        pairs, best = list(itertools.combinations(ranked, 2)), ranked[-1]
    data, comparisons, notes = _data(tables), list[Comparison](), list[str]()
    for first, second in pairs:
        title = f"{labels[second]} − {labels[first]}"
        try:
            if absent := [labels[order] for order in (first, second) if order not in values]:
                raise UsageError(f"compare: {absent[0]} has no {split} {metric} under rule={rule}; use final")
            comparisons.append(_compared(values, data, (first, second), (labels[first], labels[second])))
        except UsageError as error:
            if names:
                raise
            notes.append(f"{title} is missing: {str(error).removeprefix('compare: ')}.")
            continue
        if left_out := values.index[values[first].notna() != values[second].notna()].tolist():
            seeds = ", ".join(map(str, left_out))
            notes.append(f"{title}: only the seeds that both have count; left out: {seeds}.")
    if not comparisons:
        raise UsageError(f"compare: no two methods can be paired; {notes[0]}")
    p_values = [holm([pair.p_t for pair in comparisons]), holm([pair.p_wilcoxon for pair in comparisons])]
    comparisons = [
        pair._replace(p_t=p_t, p_wilcoxon=p_w) for pair, p_t, p_w in zip(comparisons, *p_values, strict=True)
    ]
    average = average_words(tables.counts, tables.trials, split, metric)
    caption = f"{average}, {RULE_CAPTIONS[rule].format(criterion=tables.criteria[experiments[0]])}"
    return Pairs(experiments[0], split, metric, caption, comparisons, notes, best)


def _chosen_methods(groups: pd.DataFrame) -> dict[int, str]:
    """Return the names of the methods to compare by `order`: those that validation chose, or all if it chose none.

    Raises:
        UsageError: There are fewer than two.
    """
    groups = groups[groups["chosen"] | ~groups.groupby("algorithm")["chosen"].transform("any")]
    if len(groups) < 2:
        raise UsageError("compare: needs two methods or more with finished trials")
    alone = ~groups["algorithm"].duplicated(keep=False)
    names = groups["algorithm"].where(alone, (groups["algorithm"] + " " + groups["hyperparameters"]).str.strip())
    return dict(zip(groups["order"].tolist(), names, strict=True))


def _values(tables: Tables, view: View) -> tuple[pd.DataFrame, str]:
    """Return the means over clients at the picked rounds: a row per seed, a column per `order`; and the rule."""
    done, criteria = tables.done, tables.criteria
    curves = tables.curves[~tables.curves["unseen"]].merge(done[TRIAL], on=TRIAL)
    assert view.metric is not None and view.split is not None  # noqa: PT018
    rows = pick_rounds(scores_of(curves, view.metric, view.split, criteria), criteria)
    rows = filter_rows(rows.merge(done[[*TRIAL, *_GROUP]], on=TRIAL), tables, view)
    rows = rows[rows["quantity"] == "mean"]
    trials = rows.groupby("rule")["trial"].agg(set)
    rule = view.rule or ("selected" if trials.get("selected") == trials.get("final") else "final")
    keys = ["metric", "higher_is_better", "quantity"]
    values = seed_values(rows.loc[rows["rule"] == rule, [*TRIAL, *keys, "value"]], done, keys)
    return values.pivot_table(index="seed", columns="order", values="value"), rule


def _data(tables: Tables) -> pd.DataFrame:
    """Return the columns that decide which client holds which examples, as text by order and seed."""
    trials = tables.trials.merge(tables.done[[*TRIAL, "order"]], on=TRIAL)
    columns = [name for name in trials.columns if name.startswith(_PAIRED) and name not in _NOT_PAIRED]
    texts = trials[columns].astype(object).where(trials[columns].notna(), None).map(str)
    return texts.groupby([trials["order"], trials["seed"]]).agg(lambda column: ", ".join(sorted(set(column))))


def _compared(values: pd.DataFrame, data: pd.DataFrame, orders: tuple[int, int], names: tuple[str, str]) -> Comparison:
    """Return the comparison of two methods, with p-values before the correction.

    Raises:
        UsageError: The methods have fewer than two seeds in common, or trials with the same seed had different clients.
    """
    both = values[list(orders)].dropna()
    if len(both) < 2:
        seeds = (", ".join(map(str, values[order].dropna().index)) for order in orders)
        each = " and ".join(f"{name} has seeds {of_name}" for name, of_name in zip(names, seeds, strict=True))
        raise UsageError(f"compare: {each}; a paired comparison needs two seeds or more that both have")
    for seed in both.index:
        first, second = (data.loc[(order, seed)] for order in orders)
        for column in first.index[first != second]:
            raise UsageError(
                f"compare: {column} is {first[column]} for {names[0]} and {second[column]} for {names[1]} at seed "
                f"{seed}; pairs need the same clients and examples"
            )
    differences = both[orders[1]] - both[orders[0]]
    from scipy import stats

    count, mean = len(differences), float(differences.mean())
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)) * float(differences.std()) / count**0.5
    tests = cohens_dz(differences), paired_t(differences), wilcoxon(differences)
    return Comparison(*names, orders, differences, mean - margin, mean + margin, *tests)


def find_group(name: str, rows: pd.DataFrame) -> int:
    """Return the `order` of the group of trials called `name`.

    Args:
        name: An algorithm, for its only hyperparameters or those that validation chose; or an algorithm and
            hyperparameters, as the table shows them.
        rows: Columns algorithm, hyperparameters, order, chosen.

    Raises:
        UsageError: There is no such group, or there are several.
    """
    groups = rows.drop_duplicates("order")
    label = (groups["algorithm"] + " " + groups["hyperparameters"]).str.strip()
    of_algorithm = groups[groups["algorithm"] == name]
    for found in (groups[label == name], of_algorithm, of_algorithm[of_algorithm["chosen"]]):
        if len(found) == 1:
            return int(found["order"].iloc[0])
    if of_algorithm.empty:
        raise UsageError(f"compare: no trials of {name} are done; {suggestion(name, [*label, *groups['algorithm']])}")
    labels = "; ".join(f'"{text}"' for text in label[of_algorithm.index])
    raise UsageError(
        f"compare: {name} ran with several hyperparameters and validation chose none; give one of {labels}"
    )


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test.

    It is 1 if all differences are 0. It is NaN if they all have another value, because the test then has no error to
    divide by; accuracies on few examples often differ equally by chance.
    """
    from scipy import stats

    values = np.asarray(differences, float)
    if np.ptp(values) <= _NOISE * max(1.0, float(np.abs(values).max())):
        return 1.0 if abs(float(values[0])) <= _NOISE else math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def wilcoxon(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; pairs without a difference are left out.

    With n pairs it is at least 2^(1 - n): 0.25 for three pairs, and above 0.05 for up to five. It is exact for up to
    twelve pairs, ties included.
    """
    from scipy import stats

    values = np.round(np.asarray(differences, float), 12)  # so that differences tie in spite of rounding errors
    return float(stats.wilcoxon(values[values != 0]).pvalue) if values.any() else 1.0


def cohens_dz(differences: Sequence[float]) -> float:
    """Return the mean difference divided by the standard deviation of the differences; NaN if that is 0."""
    values = np.asarray(differences, float)
    sd = float(values.std(ddof=1))
    return float(values.mean()) / sd if sd > _NOISE else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for their number, in which NaN does not count; it stays NaN."""
    ranked = pd.Series(p_values).dropna().sort_values()
    corrected = (ranked * np.arange(len(ranked), 0, -1)).cummax().clip(upper=1.0)
    return list(corrected.reindex(range(len(p_values))))


def stars(p_value: float) -> str:
    """Return *** below 0.001, ** below 0.01, * below 0.05, and nothing otherwise."""
    return next((mark for level, mark in _LEVELS if p_value < level), "")


def stars_against_best(pairs: Pairs) -> Stars:
    """Return the stars of each method by its difference from the best method; none unless all pairs were compared."""
    against = [pair for pair in pairs.comparisons if pair.orders[1] == pairs.best]
    if not against:
        return Stars()
    marks = {pair.orders[0]: stars(pair.p_t) for pair in against}
    return Stars(against[0].second, marks, {pair.orders[0]: _p_text(pair.p_t) for pair in against})


def pairs_table(pairs: Pairs, *, width: int, format: str = "text") -> str:
    """Return a table of pairs of methods: differences, effect sizes, and p-values with Holm's correction."""
    what = f"{pairs.split} {pairs.metric}{', percentage points' if is_fraction(pairs.metric) else ''}"
    title = f"{pairs.experiment}: {'one pair' if pairs.best is None else 'all pairs'}, {what}, {pairs.caption}"
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
    scale, decimals = _scale(pairs.metric)
    columns: dict[str, list[str]] = {}
    for pair in pairs.comparisons:
        low, high, mean = (f"{x * scale:+.{decimals}f}" for x in (pair.low, pair.high, pair.differences.mean()))
        cells = {
            "difference of": f"{pair.second} − {pair.first}",
            "mean": mean,
            "95 % interval": f"{low} to {high}",
            "d_z": "-" if math.isnan(pair.effect) else f"{pair.effect:+.2f}",
            "wins": f"{pair.wins} of {len(pair.differences)}",
            "p (t)": _p_text(pair.p_t),
            "p (Wilcoxon)": _p_text(pair.p_wilcoxon),
            "": stars(pair.p_t),
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    return columns


def pairs_notes(pairs: Pairs) -> list[str]:
    """Return the notes below the table of pairs: what its columns mean, and what limits the tests."""
    count, least = len(pairs.comparisons), min(len(pair.differences) for pair in pairs.comparisons)
    corrected, before = (f", Holm-corrected for {count} pairs", " before the correction") if count > 1 else ("", "")
    notes = [
        f"Paired over seeds. p: two-sided{corrected}; *, **, ***: the t test is below 0.05, 0.01, 0.001. d_z: mean "
        "difference divided by its standard deviation. wins: pairs in which the first named has the greater value."
    ]
    if (p := 2.0 ** (1 - least)) * count >= 0.05:
        notes.append(f"With {least} pairs, Wilcoxon's p is at least {p:.2g}{before}.")
    if count == 1:
        scale, decimals = _scale(pairs.metric)
        differences = pairs.comparisons[0].differences.items()
        each = ", ".join(f"{difference * scale:+.{decimals}f} ({seed})" for seed, difference in differences)
        notes.append(f"Differences by seed: {each}.")
    return [*notes, *pairs.notes]


def _p_text(p_value: float) -> str:
    """Return a p-value with four decimals, and "-" for NaN."""
    if math.isnan(p_value):
        return "-"
    return "<0.0001" if p_value < 0.0001 else f"{p_value:.4f}"


def _scale(metric: str) -> tuple[int, int]:
    """Return the factor and the decimals with which differences of a metric are shown."""
    return (100, 2) if is_fraction(metric) else (1, 4)
