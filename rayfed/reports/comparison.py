"""Paired comparison of two algorithms or hyperparameters: over common seeds, or over the clients of a single seed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.hyperparameter_groups import LOCATION_KEYS
from rayfed.reports.selection import CLIENT
from rayfed.reports.significance import NOISE, cohens_dz, paired_t, wilcoxon

# What decides which client holds which examples. The hash names rows of the dataset, and data.* the dataset.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "unseen_share", "leave_out")
# The hash covers the contents of the partition file, and what the seed of the partition draws.
_NOT_PAIRED = (*LOCATION_KEYS, "partition.file", "partition.seed")
CONFIDENCE = 0.95


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
        return sum(difference > NOISE for difference in self.differences)


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


def compare(values: pd.DataFrame, names: tuple[str, str]) -> Comparison:
    """Compare two sides, called `names`, in pairs: over the seeds that both have, or over the clients of a single one.

    Args:
        values: columns `side` (0 or 1), seed, quantity ("mean", or "client:I" for each client) and value.

    Raises:
        UsageError: the two sides have no seed in common, or not the same clients, or there is only one pair, or a value
            is infinite.
    """
    seeds = [sorted(set(values.loc[values["side"] == side, "seed"])) for side in (0, 1)]
    common = sorted(set(seeds[0]) & set(seeds[1]))
    if not common:
        words = " and ".join(f"{name} has seeds {_join(of_side)}" for name, of_side in zip(names, seeds, strict=True))
        raise UsageError(f"compare: {words}; a paired comparison needs seeds that both have")
    left_out = tuple(sorted(set(seeds[0]) ^ set(seeds[1])))
    values = values[values["seed"].isin(common)]
    if len(common) > 1:
        over, rows = "seeds", values[values["quantity"] == "mean"].assign(pair=lambda frame: frame["seed"])
    else:
        rows = values[values["quantity"].str.startswith(CLIENT)]
        over, rows = "clients", rows.assign(pair=rows["quantity"].str.removeprefix(CLIENT).astype(int))
    table = rows.pivot(index="pair", columns="side", values="value").reindex(columns=[0, 1])
    if table.isna().any(axis=None):
        pair = table.index[table.isna().any(axis=1)][0]
        raise UsageError(f"compare: {over[:-1]} {pair} has a value on one side only; both sides need the same {over}")
    if not np.isfinite(table.to_numpy()).all():
        pair = table.index[~np.isfinite(table).all(axis=1)][0]
        raise UsageError(f"compare: {over[:-1]} {pair} has an infinite value, so there is no mean difference")
    if len(table) < 2:
        raise UsageError("compare: one seed and at most one client; a confidence interval needs two pairs or more")
    return _interval(table[1] - table[0], names, over, left_out)


def check_paired(trials: pd.DataFrame, names: tuple[str, str]) -> None:
    """Raise an error if trials of the two sides with the same seed had different clients.

    Args:
        trials: columns side, seed, and the configuration.

    Raises:
        UsageError: the first column that differs.
    """
    for column in [name for name in trials.columns if name.startswith(_PAIRED) and name not in _NOT_PAIRED]:
        texts = trials[column].astype(object).where(trials[column].notna(), None).map(str)
        for seed, group in texts.groupby(trials["seed"]):
            values = [sorted(set(group[trials.loc[group.index, "side"] == side])) for side in (0, 1)]
            if all(values) and values[0] != values[1]:
                words = " and ".join(
                    f"{_join(of_side)} for {name}" for name, of_side in zip(names, values, strict=True)
                )
                raise UsageError(
                    f"compare: {column} is {words} at seed {seed}; pairs need the same clients and examples"
                )


def _interval(differences: pd.Series, names: tuple[str, str], over: str, left_out: tuple[int, ...]) -> Comparison:
    from scipy import stats

    count = len(differences)
    mean, error = float(differences.mean()), float(differences.std()) / count**0.5
    margin = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    return Comparison(
        first=names[0],
        second=names[1],
        over=over,
        pairs=[int(pair) for pair in differences.index],
        differences=differences.tolist(),
        difference=mean,
        low=mean - margin,
        high=mean + margin,
        effect=cohens_dz(differences.tolist()),
        p_t=paired_t(differences.tolist()),
        p_wilcoxon=wilcoxon(differences.tolist()),
        left_out=left_out,
    )


def _join(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values))
