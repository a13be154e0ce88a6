"""Two settings compared in pairs: on the same seeds, or on the clients of the one seed that both have."""

from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.hyperparameter_groups import PLACES
from rayfed.results.selection import CLIENT

# What decides who holds which examples. The hash says which rows of the named data, and data.* what these rows are.
_PAIRED = ("data.", "partition.", "partition_hash", "unseen_clients", "leave_out")
_NOT_PAIRED = (*PLACES, "partition.file")  # of a file, the hash says what stands in it
CONFIDENCE = 0.95


class Comparison(NamedTuple):
    """`difference` is the mean over pairs of second minus first; `low` and `high` bound its 95 % confidence interval by
    Student's t. `over` is "seeds" or "clients", `pairs` their numbers, and `differences` are in that order."""

    first: str
    second: str
    over: str
    pairs: list[int]
    differences: list[float]
    difference: float
    low: float
    high: float


def find(name: str, rows: pd.DataFrame) -> int:
    """The `order` of the setting called `name` among `rows` (algorithm, setting, order, chosen): an algorithm, for its
    only setting or the one that validation chose, or an algorithm and its setting as the table shows them.

    Raises:
        UsageError: there is none, or more than one.
    """
    known = rows.drop_duplicates("order")
    label = known["algorithm"].where(known["setting"] == "", known["algorithm"] + " " + known["setting"])
    exact = known[label == name]
    if len(exact) == 1:
        return int(exact["order"].iloc[0])
    of_algorithm = known[known["algorithm"] == name]
    if len(of_algorithm) > 1:
        of_algorithm = of_algorithm[of_algorithm["chosen"]]
        if of_algorithm.empty:
            several = "; ".join(f'"{text}"' for text in label[known["algorithm"] == name])
            raise UsageError(f"compare: {name} has several settings and validation chose none; give one of {several}")
    if of_algorithm.empty:
        raise UsageError(f"compare: no trials of {name} are done; {suggestion(name, [*label, *known['algorithm']])}")
    return int(of_algorithm["order"].iloc[0])


def compare(values: pd.DataFrame, names: tuple[str, str]) -> Comparison:
    """The comparison of two settings, called `names`.

    Args:
        values: columns `side` (0 or 1), seed, quantity ("mean", or "client:I" for each client) and value.

    Raises:
        UsageError: the two do not have the same seeds or clients, or there is only one pair.
    """
    seeds = [sorted(set(values.loc[values["side"] == side, "seed"])) for side in (0, 1)]
    if seeds[0] != seeds[1]:
        said = " and ".join(f"{name} has seeds {_list(own)}" for name, own in zip(names, seeds, strict=True))
        raise UsageError(f"compare: {said}; a paired comparison needs the same ones")
    if len(seeds[0]) > 1:
        over, rows = "seeds", values[values["quantity"] == "mean"].assign(pair=lambda frame: frame["seed"])
    else:
        rows = values[values["quantity"].str.startswith(CLIENT)]
        over, rows = "clients", rows.assign(pair=rows["quantity"].str.removeprefix(CLIENT).astype(int))
    table = rows.pivot(index="pair", columns="side", values="value").reindex(columns=[0, 1])
    if table.isna().any(axis=None):
        pair = table.index[table.isna().any(axis=1)][0]
        raise UsageError(f"compare: {over[:-1]} {pair} has a value on one side alone; {over} must be the same")
    if len(table) < 2:
        raise UsageError("compare: one seed and at most one client; a confidence interval needs two pairs or more")
    return _interval(table[1] - table[0], names, over)


def check_paired(trials: pd.DataFrame, names: tuple[str, str]) -> None:
    """Raises UsageError where the trials of the two sides (columns side, seed and the configuration) with one seed had
    different clients."""
    for column in [name for name in trials.columns if name.startswith(_PAIRED) and name not in _NOT_PAIRED]:
        texts = trials[column].astype(object).where(trials[column].notna(), None).map(str)
        for seed, group in texts.groupby(trials["seed"]):
            found = [sorted(set(group[trials.loc[group.index, "side"] == side])) for side in (0, 1)]
            if all(found) and found[0] != found[1]:
                said = " and ".join(f"{_list(own)} for {name}" for name, own in zip(names, found, strict=True))
                raise UsageError(
                    f"compare: {column} is {said} at seed {seed}; pairs need the same clients and examples"
                )


def _interval(differences: pd.Series, names: tuple[str, str], over: str) -> Comparison:
    from scipy import stats

    count = len(differences)
    mean, error = float(differences.mean()), float(differences.std()) / count**0.5
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, count - 1)) * error
    pairs = [int(pair) for pair in differences.index]
    return Comparison(*names, over, pairs, differences.tolist(), mean, mean - reach, mean + reach)


def _list(values: list) -> str:
    return ", ".join(map(str, values))
