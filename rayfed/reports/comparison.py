"""Paired comparison of two methods, over common seeds or over the clients of a single seed, with tests of significance.

Sources: Wilcoxon (1945), "Individual comparisons by ranking methods"; Holm (1979), "A simple sequentially rejective
multiple test procedure"; Cohen (1988), "Statistical power analysis for the behavioral sciences", for d_z.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.selection import CLIENT
from rayfed.reports.trial_groups import LOCATION_KEYS

# What decides which client holds which examples. The hash names rows of the dataset, and data.* the dataset.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "unseen_share", "leave_out")
# The hash covers the contents of the partition file, and what the seed of the partition draws.
_NOT_PAIRED = (*LOCATION_KEYS, "partition.file", "partition.seed")
_CONFIDENCE = 0.95
_EXACT_PAIRS = 12  # the most pairs for which Wilcoxon's test goes through all signs, so that ties and zeros are exact
_NOISE = 1e-12  # differences up to this are rounding errors of means
_LEVELS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))


class Side(NamedTuple):
    """A method in comparisons.

    Attributes:
        name: its name.
        values: by seed, the value of each quantity: "mean", and "client:I" for each client.
        data: by seed, what decides which client holds which examples: columns of the table `trials` as text.
    """

    name: str
    values: dict[int, dict[str, float]]
    data: dict[int, dict[str, str]]


class Comparison(NamedTuple):
    """The result of a paired comparison.

    Attributes:
        first, second: the names of the two sides.
        over: what the pairs are, "seeds" or "clients".
        pairs: the numbers of the seeds or clients.
        differences: second minus first, in the order of `pairs`.
        difference: the mean of `differences`.
        low, high: its 95 % confidence interval by Student's t.
        effect: the effect size, Cohen's d_z.
        p_t, p_wilcoxon: p-values of the paired t test and of Wilcoxon's signed-rank test.
        left_out: the seeds that only one side has.
    """

    first: str
    second: str
    over: str
    pairs: list[int]
    differences: list[float]
    difference: float
    low: float
    high: float
    effect: float
    p_t: float
    p_wilcoxon: float
    left_out: tuple[int, ...] = ()

    @property
    def wins(self) -> int:
        """The number of pairs in which the second has the greater value."""
        return sum(difference > _NOISE for difference in self.differences)


def find_group(name: str, rows: pd.DataFrame) -> int:
    """Return the `order` of the group of trials called `name`.

    Args:
        name: an algorithm, which stands for its only hyperparameters or those that validation chose, or an algorithm
            and its hyperparameters as the table shows them.
        rows: columns algorithm, hyperparameters, order, chosen.

    Raises:
        UsageError: there is none, or more than one.
    """
    groups = rows.drop_duplicates("order")
    hyperparameters = groups["hyperparameters"]
    label = groups["algorithm"].where(hyperparameters == "", groups["algorithm"] + " " + hyperparameters)
    exact = groups[label == name]
    if len(exact) == 1:
        return int(exact["order"].iloc[0])
    of_algorithm = groups[groups["algorithm"] == name]
    if len(of_algorithm) > 1:
        of_algorithm = of_algorithm[of_algorithm["chosen"]]
        if of_algorithm.empty:
            labels = "; ".join(f'"{text}"' for text in label[groups["algorithm"] == name])
            raise UsageError(
                f"compare: {name} ran with several hyperparameters and validation chose none; give one of {labels}"
            )
    if of_algorithm.empty:
        raise UsageError(f"compare: no trials of {name} are done; {suggestion(name, [*label, *groups['algorithm']])}")
    return int(of_algorithm["order"].iloc[0])


def sides_of(values: pd.DataFrame, trials: pd.DataFrame, names: Mapping[int, str]) -> dict[int, Side]:
    """Return the methods in `names` by their `order`, as sides of comparisons.

    `values` has the columns order, seed, quantity ("mean", or "client:I" for each client) and value. `trials` has the
    columns order and seed, and the configuration.
    """
    sides = {order: Side(name, {}, {}) for order, name in names.items()}
    of_sides = values[values["order"].isin(list(names)) & values["value"].notna()]
    for order, seed, quantity, value in of_sides[["order", "seed", "quantity", "value"]].itertuples(index=False):
        sides[order].values.setdefault(int(seed), {})[quantity] = float(value)
    columns = [name for name in trials.columns if name.startswith(_PAIRED) and name not in _NOT_PAIRED]
    of_sides = trials[trials["order"].isin(list(names))]
    texts = of_sides[columns].astype(object).where(of_sides[columns].notna(), None).map(str)
    for (order, seed), group in texts.groupby([of_sides["order"], of_sides["seed"]]):
        sides[order].data[int(seed)] = {column: ", ".join(sorted(set(group[column]))) for column in columns}
    return sides


def compare(first: Side, second: Side) -> Comparison:
    """Compare two sides in pairs: over the seeds that both have, or over the clients of a single common seed.

    Raises:
        UsageError: trials with the same seed had different clients, the two sides have no seed in common or not the
            same clients, there is only one pair, or a value is infinite.
    """
    _check_same_data(first, second)
    common = sorted(first.values.keys() & second.values.keys())
    if not common:
        seeds = [f"{side.name} has seeds {', '.join(map(str, sorted(side.values)))}" for side in (first, second)]
        words = " and ".join(seeds)
        raise UsageError(f"compare: {words}; a paired comparison needs seeds that both have")
    over = "seeds" if len(common) > 1 else "clients"
    before, after = (_by_pair(side, common) for side in (first, second))
    if one_sided := sorted(before.keys() ^ after.keys()):
        raise UsageError(
            f"compare: {over[:-1]} {one_sided[0]} has a value on one side only; both sides need the same {over}"
        )
    if infinite := [pair for pair in sorted(before) if not math.isfinite(before[pair] + after[pair])]:
        raise UsageError(f"compare: {over[:-1]} {infinite[0]} has an infinite value, so there is no mean difference")
    if len(before) < 2:
        raise UsageError("compare: one seed and at most one client; a confidence interval needs two pairs or more")
    from scipy import stats

    pairs = sorted(before)
    differences = [after[pair] - before[pair] for pair in pairs]
    mean, error = float(np.mean(differences)), float(np.std(differences, ddof=1)) / len(pairs) ** 0.5
    margin = float(stats.t.ppf((1 + _CONFIDENCE) / 2, len(pairs) - 1)) * error
    return Comparison(
        first=first.name,
        second=second.name,
        over=over,
        pairs=pairs,
        differences=differences,
        difference=mean,
        low=mean - margin,
        high=mean + margin,
        effect=cohens_dz(differences),
        p_t=paired_t(differences),
        p_wilcoxon=wilcoxon(differences),
        left_out=tuple(sorted(first.values.keys() ^ second.values.keys())),
    )


def _by_pair(side: Side, seeds: Sequence[int]) -> dict[int, float]:
    """Return the values of a side by seed, or by client if there is a single seed."""
    if len(seeds) > 1:
        return {seed: side.values[seed]["mean"] for seed in seeds if "mean" in side.values[seed]}
    clients = {name: value for name, value in side.values[seeds[0]].items() if name.startswith(CLIENT)}
    return {int(name.removeprefix(CLIENT)): value for name, value in clients.items()}


def _check_same_data(first: Side, second: Side) -> None:
    """Raise `UsageError` for the first column that says that trials with the same seed had different clients."""
    for seed in sorted(first.data.keys() & second.data.keys()):
        for column, text in first.data[seed].items():
            if (other := second.data[seed][column]) != text:
                raise UsageError(
                    f"compare: {column} is {text} for {first.name} and {other} for {second.name} at seed {seed}; "
                    "pairs need the same clients and examples"
                )


def paired_t(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Student's paired t test.

    It is 1 if all differences are 0, and NaN if they are equal otherwise, because the test then has no error to divide
    by (accuracies on few examples often differ equally by chance).
    """
    from scipy import stats

    values = np.asarray(differences, float)
    if np.ptp(values) <= _NOISE * max(1.0, float(np.abs(values).max())):
        return 1.0 if abs(float(values[0])) <= _NOISE else math.nan
    return float(stats.ttest_1samp(values, 0.0).pvalue)


def wilcoxon(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of Wilcoxon's signed-rank test; pairs without a difference are left out.

    With n pairs it cannot be below 2^(1 - n): 0.25 for three pairs, and above 0.05 up to five.
    """
    from scipy import stats

    values = np.round(np.asarray(differences, float), 12)  # differences that only rounding errors tell apart are tied
    values = values[values != 0]
    if not len(values):
        return 1.0
    if len(values) > _EXACT_PAIRS:
        return float(stats.wilcoxon(values).pvalue)
    ranks = stats.rankdata(np.abs(values))
    signs = (np.arange(2 ** len(values))[:, None] >> np.arange(len(values))) & 1  # of all 2^n equally likely outcomes
    sums, middle = signs @ ranks, ranks.sum() / 2
    observed = abs(float(ranks[values > 0].sum()) - middle)
    return float((np.abs(sums - middle) >= observed - 1e-9).mean())


def cohens_dz(differences: Sequence[float]) -> float:
    """Return the mean difference divided by the standard deviation of the differences; NaN if that is 0."""
    values = np.asarray(differences, float)
    sd = float(values.std(ddof=1))
    return float(values.mean()) / sd if sd > _NOISE else math.nan


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values after Holm's correction for their number; NaN stays NaN and does not count."""
    order = sorted((index for index, p in enumerate(p_values) if not math.isnan(p)), key=lambda index: p_values[index])
    corrected = [math.nan] * len(p_values)
    largest = 0.0
    for position, index in enumerate(order):
        largest = max(largest, min(1.0, (len(order) - position) * p_values[index]))
        corrected[index] = largest
    return corrected


def stars(p_value: float) -> str:
    """Return *** below 0.001, ** below 0.01, * below 0.05, and nothing otherwise."""
    return next((mark for level, mark in _LEVELS if p_value < level), "")


def p_value_text(p_value: float) -> str:
    """Return a p-value with four decimals, and "-" for NaN."""
    if math.isnan(p_value):
        return "-"
    return "<0.0001" if p_value < 0.0001 else f"{p_value:.4f}"
