"""Drawing a part of some rows with the classes in proportion, so that small parts have all classes where possible."""

from collections.abc import Sequence

import numpy as np


def stratified(rows: np.ndarray, count: int, classes: np.ndarray) -> np.ndarray:
    """Return which of `rows` make a part of `count` rows with their classes in proportion, bool [n].

    The last rows of each class are drawn, so the rows must be shuffled. A class with two rows or more is in the part
    and in the rest, if the part has room for all such classes. A class with a single row stays in the rest.

    Args:
        rows: Shuffled rows of a dataset, int64 [n].
        count: The size of the part; at most n.
        classes: The class of each row of the dataset, int64 [N].
    """
    _, members, sizes = np.unique(classes[rows], return_inverse=True, return_counts=True)
    drawn = np.zeros(len(rows), bool)
    for label, quota in enumerate(quotas(sizes.tolist(), count)):
        places = np.flatnonzero(members == label)
        drawn[places[len(places) - quota :]] = True
    return drawn


def quotas(sizes: Sequence[int], count: int) -> list[int]:
    """Return how many rows of classes with `sizes` rows make a part of `count` rows, by the largest remainder.

    The part has one row at least of each class that has two, if it has room, and leaves one row at least of each class
    in the rest, if `count` allows it.
    """
    whole = np.array(sizes, int)
    exact = count * whole / whole.sum()
    most = np.maximum(whole - 1, 0)
    if most.sum() < count:
        most = whole
    has_several = whole > 1
    least = np.zeros_like(whole)
    if has_several.sum() <= count:
        least = has_several.astype(int)
    parts = exact.astype(int).clip(least, most)
    while parts.sum() < count:
        missing = np.where(parts < most, exact - parts, -np.inf)
        parts[missing.argmax()] += 1
    while parts.sum() > count:
        missing = np.where(parts > least, exact - parts, np.inf)
        parts[missing.argmin()] -= 1
    quotas: list[int] = parts.tolist()
    return quotas


def single_rows(rows: np.ndarray, classes: np.ndarray) -> list[int]:
    """Return the classes that have exactly one of `rows`."""
    labels, sizes = np.unique(classes[rows], return_counts=True)
    return [int(label) for label in labels[sizes == 1]]
