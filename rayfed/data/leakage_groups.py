"""Rows that show one original, such as a digit on two grounds: nobody is tested on what somebody trains on."""

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.dataset import ClientRows, Dataset


def first_of_each_group(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """`rows` with one of each original, the first; the others follow it with `versions`."""
    if dataset.leakage_group is None:
        return rows
    return rows[np.sort(np.unique(dataset.leakage_group[rows], return_index=True)[1])]


def expand_groups(dataset: Dataset, rows: np.ndarray, among: np.ndarray) -> np.ndarray:
    """For each of `rows`, one after the other, all rows of `among` that show its original."""
    if dataset.leakage_group is None:
        return rows
    order = among[np.argsort(dataset.leakage_group[among], kind="stable")]
    codes, wanted = dataset.leakage_group[order], dataset.leakage_group[rows]
    begins = np.searchsorted(codes, wanted)
    counts = np.searchsorted(codes, wanted, side="right") - begins
    place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return order[np.repeat(begins, counts) + place]


def cap_rows(dataset: Dataset, rows: np.ndarray, among: np.ndarray, most: int | None) -> np.ndarray:
    """Of `rows`, from the front, as many as have at most `most` versions in all."""
    if dataset.leakage_group is None or most is None:
        return rows[:most]
    codes, counts = np.unique(dataset.leakage_group[among], return_counts=True)
    total = np.cumsum(counts[np.searchsorted(codes, dataset.leakage_group[rows])])
    return rows[: np.searchsorted(total, most, side="right")]


def draw_groups(dataset: Dataset, rows: np.ndarray, random: np.random.Generator, kept: float) -> np.ndarray | None:
    """bool [N]: a draw over the originals of `rows`, of which the share `kept` is false and the others are true.

    None where no two of `rows` show the same original: then rows may be drawn one by one.
    """
    if dataset.leakage_group is None:
        return None
    codes = np.unique(dataset.leakage_group[rows])
    if len(codes) == len(rows):
        return None
    others = random.permutation(codes)[int(len(codes) * kept + 1e-9) :]
    return np.isin(dataset.leakage_group, others)


def check_no_leakage(dataset: Dataset, parts: list[ClientRows]) -> None:
    """Raises UsageError where a part is tested on an original that a part trains on or is validated with."""
    if dataset.leakage_group is None:
        return
    tested = np.concatenate([part.test for part in parts])
    both = tested[np.isin(dataset.leakage_group[tested], dataset.leakage_group[_used(parts)])]
    if len(both):
        raise UsageError(
            f"partition: {len(both)} test rows of {dataset.name}, row {both[0]} the first, show what is trained on in "
            "another domain; expected all versions of an original on one side"
        )


def unheld_rows(dataset: Dataset, parts: list[ClientRows], domain: str) -> np.ndarray:
    """The rows of a domain that nobody holds, without versions of what the parts train on or are validated with."""
    rows = np.flatnonzero(dataset.domain == dataset.domains.index(domain))
    if dataset.leakage_group is None:
        return rows
    left = rows[~np.isin(dataset.leakage_group[rows], dataset.leakage_group[_used(parts)])]
    if not len(left):
        raise UsageError(
            f"dataset {dataset.name}: every example of {domain}, which is left out, is trained on in another domain; "
            "keep some for testing, or a smaller share for training"
        )
    return left


def _used(parts: list[ClientRows]) -> np.ndarray:
    return np.concatenate([rows for part in parts for rows in (part.train, part.val)])
