"""A table of results, however it is printed: a row per method; a column per domain, the mean and the worst client."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from rayfed.records.metric_names import is_fraction
from rayfed.reports.selection import DOMAIN, FEW_CLIENTS

CHOSEN = "†"
"""Marks hyperparameters that validation chose."""
_LAST = (("mean", "AVG"), ("best10", "best 10 %"), ("worst10", "worst 10 %"), ("worst", "worst"))
_SEEDS = "seeds"


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds, as they are shown: accuracies in percent.

    Attributes:
        mean: The mean.
        sd: The standard deviation; None for a single seed, which has none.
        decimals: How many decimals to show.
        rank: 1 for the best of a column, 2 for the second, and 0 for others. Equal numbers have equal ranks.
        stars: Stars of significance.
        seeds: The number of seeds; fewer than the row has where no client held the domain at some seeds.
    """

    mean: float
    sd: float | None
    decimals: int
    rank: int = 0
    stars: str = ""
    seeds: int = field(default=0, compare=False)

    @property
    def number(self) -> str:
        return f"{self.mean:.{self.decimals}f}"

    @property
    def spread(self) -> str:
        """The standard deviation; empty if there is none."""
        return "" if self.sd is None else f"{self.sd:.{self.decimals}f}"

    def text(self, between: str = " ± ") -> str:
        return (f"{self.number}{between}{self.spread}" if self.spread else self.number) + self.stars


@dataclass(frozen=True)
class Column:
    """A column of numbers; None where a method has no value."""

    header: str
    cells: list[Cell | None]


@dataclass(frozen=True)
class ResultTable:
    """The rows are methods with their hyperparameters.

    Attributes:
        algorithms: By row, the name of the algorithm.
        hyperparameters: By row, what varies, such as "mu=1"; empty strings where nothing does.
        chosen: By row, whether validation chose these hyperparameters among several.
        columns: The numbers.
        seeds: By row, the number of seeds of the mean over clients.
        orders: By row, the number of the group of trials (`order` in a summary).
        remarks: Sentences on columns that are left out because they repeat another, and on those with fewer seeds.
    """

    algorithms: list[str]
    hyperparameters: list[str]
    chosen: list[bool]
    columns: list[Column]
    seeds: list[int]
    orders: list[int]
    remarks: list[str]

    @property
    def labels(self) -> list[str]:
        """The algorithm and its hyperparameters, one text per row."""
        pairs = zip(self.algorithms, self.hyperparameters, strict=True)
        return [" ".join(filter(None, pair)) for pair in pairs]

    @property
    def same_seeds(self) -> int | None:
        """The number of seeds of every row; None if they differ."""
        return self.seeds[0] if len(set(self.seeds)) == 1 else None

    @property
    def answers_first(self) -> list[Column]:
        """The columns with the mean over clients and its like before those of the domains."""
        headers = [column.header for column in self.columns]
        if _LAST[0][1] not in headers:  # the domain is what there is instead
            return self.columns
        return sorted(self.columns, key=lambda column: column.header not in dict(_LAST).values())

    def cells(self, between: str = " ± ") -> dict[str, list[str]]:
        """Return the columns of numbers as text by header, and the number of seeds if it differs between rows."""
        columns = {
            column.header: [cell.text(between) if cell else "-" for cell in column.cells] for column in self.columns
        }
        return columns if self.same_seeds else {**columns, _SEEDS: list(map(str, self.seeds))}


class Stars(NamedTuple):
    """Stars of significance.

    Attributes:
        best: the name of the method that the others are compared with.
        marks: the stars by algorithm and hyperparameters.
        p_values: the p-values of the t test, corrected by Holm's method, likewise.
    """

    best: str = ""
    marks: Mapping[tuple[str, str], str] = MappingProxyType({})
    p_values: Mapping[tuple[str, str], str] = MappingProxyType({})


def make_table(rows: pd.DataFrame, metric: str, stars: Stars | None = None) -> ResultTable:
    """Return `rows` (of one experiment, metric, split and rule; see `Summary.rows`) as a table.

    There is a column for each domain, unless there are more than `FEW_CLIENTS`; then the mean over clients, the best
    and the worst tenth of them, where there are many, and the worst client. The mean is left out where there is one
    domain that it repeats, and the worst client where it repeats another column.

    Args:
        rows: The rows.
        metric: Their metric.
        stars: Stars of the column of means.
    """
    groups = {int(order): group.set_index("quantity") for order, group in rows.groupby("order")}
    first = [group.iloc[0] for group in groups.values()]
    counts = rows.groupby("algorithm")["order"].nunique()
    domains = sorted({name for name in rows["quantity"] if name.startswith(DOMAIN)}, key=_number_key)
    remarks = []
    if len(domains) > FEW_CLIENTS:
        remarks = [f"The {len(domains)} domains have no columns here; --format csv has them."]
        domains = []
    better = bool(rows["higher_is_better"].iloc[0])
    last = [(name, header) for name, header in _LAST if (rows["quantity"] == name).any()]
    columns = {
        name: Column(header, _ranked([_cell(group, name, metric) for group in groups.values()], better))
        for name, header in [*((name, _domain_header(name)) for name in domains), *last]
    }
    remarks += _without_repeats(columns, domains)
    seeds = [int(group.loc["mean", "seeds"]) for group in groups.values()]
    remarks += _fewer_seeds(columns.values(), seeds)
    methods = [(str(row["algorithm"]), str(row["hyperparameters"])) for row in first]
    if stars:
        shown = "mean" if "mean" in columns else domains[0]
        pairs = zip(methods, columns[shown].cells, strict=True)
        cells = [replace(cell, stars=stars.marks.get(method, "")) if cell else None for method, cell in pairs]
        columns[shown] = replace(columns[shown], cells=cells)
    return ResultTable(
        algorithms=[algorithm for algorithm, _ in methods],
        hyperparameters=[hyperparameters for _, hyperparameters in methods],
        chosen=[bool(row["chosen"]) and counts[row["algorithm"]] > 1 for row in first],
        columns=list(columns.values()),
        seeds=seeds,
        orders=list(groups),
        remarks=remarks,
    )


def _without_repeats(columns: dict[str, Column], domains: Sequence[str]) -> list[str]:
    """Remove the columns that repeat another one, and return a sentence on each that a reader would look for."""
    remarks = []
    for name, header in (("worst", "worst"), ("mean", "AVG")):
        if name == "mean" and len(domains) != 1:
            continue  # if it equals a domain's column, then by coincidence
        others = [columns[o] for o in columns if o.startswith(DOMAIN) or (name == "worst" and o != name)]
        if same := next((column for column in others if column.cells == columns[name].cells), None):
            del columns[name]
            if len(domains) > 1 or "worst10" in columns:
                remarks.append(f"{header}: the same as {same.header} in every row.")
    return remarks


def _domain_header(quantity: str) -> str:
    """Return the name of a domain, told apart from the headers that every table has."""
    domain = quantity.removeprefix(DOMAIN)
    return f"domain {domain}" if domain in (_SEEDS, *dict(_LAST).values()) else domain


def _cell(group: pd.DataFrame, quantity: str, metric: str) -> Cell | None:
    if quantity not in group.index:
        return None
    mean, sd = float(group.loc[quantity, "mean"]), float(group.loc[quantity, "sd"])
    scale, decimals = (100, 2) if is_fraction(metric) else (1, decimals_of(mean))
    return Cell(scale * mean, None if math.isnan(sd) else scale * sd, decimals, seeds=int(group.loc[quantity, "seeds"]))


def _fewer_seeds(columns: Iterable[Column], seeds: Sequence[int]) -> list[str]:
    """Return a sentence on the columns whose cells have fewer seeds than their rows, if there are any."""
    words = []
    for column in columns:
        cells = [(cell.seeds, of_row) for cell, of_row in zip(column.cells, seeds, strict=True) if cell]
        if any(of_cell < of_row for of_cell, of_row in cells):
            least, most = min(of_cell for of_cell, _ in cells), max(of_cell for of_cell, _ in cells)
            words.append(f"{column.header} {least if least == most else f'{least} to {most}'}")
    return [f"Columns with values of fewer seeds: {', '.join(words)}."] if words else []


def _ranked(cells: Sequence[Cell | None], higher_is_better: bool) -> list[Cell | None]:
    """Return `cells` with the ranks of the best and the second, by the numbers as they are shown."""
    shown = sorted({float(cell.number) for cell in cells if cell}, reverse=higher_is_better)
    if len(shown) < 2:
        return list(cells)
    ranks = {number: rank for rank, number in enumerate(shown[:2], start=1)}
    return [replace(cell, rank=ranks.get(float(cell.number), 0)) if cell else None for cell in cells]


def decimals_of(mean: float) -> int:
    """Return the decimals that give `mean` four significant digits, so that mean and sd have the same decimals."""
    if not math.isfinite(mean) or mean == 0:
        return 4
    return min(6, max(0, 3 - math.floor(math.log10(abs(mean)))))


def _number_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts client_2 before client_10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
