"""Published values in brackets beside ours, and how many of their intervals overlap."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rayfed.core.words import counted, first_few
from rayfed.records.published import Published, read_published
from rayfed.records.storage import open_storage
from rayfed.reports.tables import MEAN, Cell, ResultTable

CONFIDENCE = 0.95
_MOST_NAMED = 6

Number = tuple[float, float | None]


class Compared(NamedTuple):
    """A table with published values, and whether the intervals of both overlap, by row and column."""

    table: ResultTable
    overlaps: dict[str, bool]


def published_values(folder: str | Path, experiments: Iterable[str]) -> dict[str, Published]:
    """Return the published values of those `experiments` in a folder of results that have some."""
    storage = open_storage(folder)
    found = {}
    for experiment in experiments:
        published = read_published(storage.child(experiment.partition(" (")[0]))  # its data may be in the name
        if published is not None:
            found[experiment] = published
    return found


def with_published(table: ResultTable, published: Published, orders: Mapping[str, int]) -> Compared:
    """Return `table` with the published values of its rows; `orders` has the group of each trial."""
    values: dict[tuple[int, str], Number] = {}
    for value in published.values:
        for order in {orders[trial] for trial in value.trials if trial in orders}:
            values[order, value.column] = value.mean, value.sd
    columns = []
    overlaps: dict[str, bool] = {}
    has_mean = any(column.header == MEAN for column in table.columns)
    for place, column in enumerate(table.columns):
        name = column.header
        if place == 0 and not has_mean:  # a single domain: its mean would be a repetition
            name = MEAN
        cells: list[Cell | None] = []
        for label, order, cell in zip(table.labels, table.orders, column.cells, strict=True):
            number = values.get((order, name))
            if cell is not None and number is not None:
                cell = replace(cell, published=number)
                overlaps[f"{label} {column.header}"] = overlap(cell, published.seeds)
            cells.append(cell)
        columns.append(column._replace(cells=cells))
    return Compared(replace(table, columns=columns), overlaps)


def overlap(cell: Cell, seeds: int) -> bool:
    """Return whether the interval of a cell and that of the published value, over `seeds`, have a common point."""
    assert cell.published is not None
    low, high = interval(cell.mean, cell.sd, cell.seeds)
    other_low, other_high = interval(*cell.published, seeds)
    return low <= other_high and other_low <= high


def interval(mean: float, sd: float | None, seeds: int) -> tuple[float, float]:
    """Return the confidence interval of a mean over seeds by Student's t; the mean alone if its error is not known."""
    from scipy.stats import t  # takes half a second

    if sd is None or seeds < 2:
        return mean, mean
    half = float(t.ppf((1 + CONFIDENCE) / 2, seeds - 1)) * sd / math.sqrt(seeds)
    return mean - half, mean + half


def published_note(compared: Compared, published: Published) -> str:
    """Return whose values stand in the table, and how many agree; empty if there are none."""
    overlaps = compared.overlaps
    if not overlaps:
        return ""
    seeds = counted(published.seeds, "seed")
    source = ", ".join(filter(None, [published.source, published.where, seeds]))
    apart = [name for name, is_one in overlaps.items() if not is_one]
    agree = f"{sum(overlaps.values())} of {len(overlaps)} values{_named(apart)}"
    intervals = f"{100 * CONFIDENCE:g} % intervals of the means (t, over seeds)"
    sentences = [f"In brackets: {source}.", f"The {intervals} overlap in {agree}."]
    if published.changed:
        keys = ", ".join(published.changed)
        sentences.append(f"The command changed {keys}, so that these configurations are not the published ones.")
    return " ".join(sentences)


def _named(names: list[str]) -> str:
    """Return ", not in a, b", or nothing."""
    if not names:
        return ""
    return f", not in {first_few(names, _MOST_NAMED)}"
