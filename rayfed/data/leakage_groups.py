"""Leakage groups: rows that show the same original, such as a digit on two backgrounds.

Partitions keep the rows of a group together, so that no client is tested on an original that a client trains on.
"""

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.rng import floor_share
from rayfed.data.dataset import ClientRows, Dataset


def first_of_each_group(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return the first of `rows` in each leakage group; `expand_groups` adds the others again."""
    if dataset.leakage_group is None:
        return rows
    return rows[np.sort(np.unique(dataset.leakage_group[rows], return_index=True)[1])]


def own_tests(dataset: Dataset) -> np.ndarray:
    """Return a mask, bool [N], of the dataset's own test examples and all rows of their leakage groups."""
    if dataset.leakage_group is None:
        return dataset.is_test
    return np.isin(dataset.leakage_group, dataset.leakage_group[dataset.is_test])


def expand_groups(dataset: Dataset, rows: np.ndarray, among: np.ndarray) -> np.ndarray:
    """Return, for each of `rows` in order, all rows of `among` in its leakage group."""
    if dataset.leakage_group is None:
        return rows
    order = among[np.argsort(dataset.leakage_group[among], kind="stable")]
    sorted_groups, groups = dataset.leakage_group[order], dataset.leakage_group[rows]
    starts = np.searchsorted(sorted_groups, groups)
    counts = np.searchsorted(sorted_groups, groups, side="right") - starts
    offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.repeat(starts, counts) + offsets]


def cap_rows(dataset: Dataset, rows: np.ndarray, among: np.ndarray, limit: int | None) -> np.ndarray:
    """Return the longest prefix of `rows` whose leakage groups have at most `limit` rows of `among` in total."""
    if dataset.leakage_group is None or limit is None:
        return rows[:limit]
    groups, counts = np.unique(dataset.leakage_group[among], return_counts=True)
    total = np.cumsum(counts[np.searchsorted(groups, dataset.leakage_group[rows])])
    return rows[: np.searchsorted(total, limit, side="right")]


def draw_groups(dataset: Dataset, rows: np.ndarray, random: np.random.Generator, rest: float) -> np.ndarray | None:
    """Return a mask, bool [N], of random leakage groups of `rows`: all but the share `rest` of the groups.

    The result is None if every group has only one of `rows`, so that rows may be drawn individually.
    """
    if dataset.leakage_group is None:
        return None
    groups = np.unique(dataset.leakage_group[rows])
    if len(groups) == len(rows):
        return None
    return np.isin(dataset.leakage_group, random.permutation(groups)[floor_share(len(groups), rest) :])


def check_no_leakage(dataset: Dataset, clients: list[ClientRows]) -> None:
    """Raise UsageError if a client is tested on a leakage group that a client trains on or validates with."""
    if dataset.leakage_group is None:
        return
    tested = np.concatenate([client.test for client in clients])
    leaked = tested[np.isin(dataset.leakage_group[tested], dataset.leakage_group[_fitted_rows(clients)])]
    if len(leaked):
        rows = f"{len(leaked)} test rows of {dataset.name}, the first of them row {leaked[0]}"
        remedy = "expected all rows of a leakage group on one side"
        raise UsageError(f"partition: {rows}, show originals that are trained on in another domain; {remedy}")


def unheld_rows(dataset: Dataset, clients: list[ClientRows], domain: str) -> np.ndarray:
    """Return the rows of a domain that is left out, without leakage groups that clients train on or validate with."""
    rows = np.flatnonzero(dataset.domain == dataset.domains.index(domain))
    if dataset.leakage_group is not None:
        rows = rows[~np.isin(dataset.leakage_group[rows], dataset.leakage_group[_fitted_rows(clients)])]
    return rows


def _fitted_rows(clients: list[ClientRows]) -> np.ndarray:
    """Return the rows that any client trains on or validates with."""
    return np.concatenate([rows for client in clients for rows in (client.train, client.val)])
