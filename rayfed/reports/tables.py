"""Tables of results: a row per method, columns for domains, mean and worst client, and the marks of the best."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

import pandas as pd

from rayfed.core.round_record import is_fraction
from rayfed.reports.selection import DOMAIN, FEW_CLIENTS

CHOSEN = "†"
"""Marks hyperparameters that validation chose."""
MEAN = "AVG"
_LAST = {"mean": MEAN, "best10": "best 10 %", "worst10": "worst 10 %", "worst": "worst"}
"""The columns after those of domains: their quantities, and their headers."""
_SEEDS = "seeds"


@dataclass(frozen=True)
class Cell:
    """Mean and standard deviation over seeds; accuracies are in percent.

    Attributes:
        sd: The standard deviation; None for a single seed.
        decimals: The number of decimals to show.
        rank: 1 for the best of a column, 2 for the second, 0 for the rest. Equal numbers have equal ranks.
        stars: Stars of significance.
        seeds: The number of seeds, which is below that of the row if no client held the domain at some seeds.
        published: Mean and standard deviation that somebody published.
    """

    mean: float
    sd: float | None
    decimals: int
    rank: int = 0
    stars: str = ""
    seeds: int = field(default=0, compare=False)
    published: tuple[float, float | None] | None = None

    @property
    def number(self) -> str:
        return f"{self.mean:.{self.decimals}f}"

    @property
    def spread(self) -> str:
        """The standard deviation as text; empty if there is none."""
        if self.sd is None:
            return ""
        return f"{self.sd:.{self.decimals}f}"

    def text(self, between: str = " ± ") -> str:
        """Return mean and standard deviation with `between` between them, the stars, and what was published."""
        own = self.number + self.stars
        if self.spread:
            own = f"{self.number}{between}{self.spread}{self.stars}"
        if self.published is None:
            return own
        if "\n" in between:
            return f"{own}\n{self.beside()}"
        return f"{own} {self.beside(between)}"

    def beside(self, between: str = " ± ") -> str:
        """Return what was published, in brackets; empty if nothing was."""
        if self.published is None:
            return ""
        mean, sd = self.published
        number = f"{mean:.{self.decimals}f}"
        if sd is None:
            return f"[{number}]"
        return f"[{number}{between}{sd:.{self.decimals}f}]"


class ResultColumn(NamedTuple):
    """A column of numbers; None where a method has no value."""

    header: str
    cells: list[Cell | None]


@dataclass(frozen=True)
class ResultTable:
    """A table whose rows are methods with their hyperparameters.

    Attributes:
        algorithms: The name of the algorithm in each row.
        hyperparameters: What varies in each row, such as "mu=1"; empty strings if nothing varies.
        chosen: Whether validation chose the hyperparameters of a row among several.
        columns: The numbers.
        seeds: The number of seeds of each row's mean over clients.
        orders: The group of trials of each row (`order` in a summary).
        remarks: Sentences on columns that are left out, and on columns with fewer seeds.
        has_rejected: Whether there are rows that validation did not choose. They have no ranks.
    """

    algorithms: list[str]
    hyperparameters: list[str]
    chosen: list[bool]
    columns: list[ResultColumn]
    seeds: list[int]
    orders: list[int]
    remarks: list[str]
    has_rejected: bool = False

    @property
    def labels(self) -> list[str]:
        """The algorithm and its hyperparameters, one text per row."""
        pairs = zip(self.algorithms, self.hyperparameters, strict=True)
        return [" ".join(filter(None, pair)) for pair in pairs]

    @property
    def same_seeds(self) -> int | None:
        """The number of seeds of every row; None if they differ."""
        if len(set(self.seeds)) > 1:
            return None
        return self.seeds[0]

    @property
    def answers_first(self) -> list[ResultColumn]:
        """The columns, with means, tenths and the worst client before the domains."""
        headers = [column.header for column in self.columns]
        if MEAN not in headers:  # a single domain has no AVG beside it
            return self.columns
        answers = _LAST.values()
        return sorted(self.columns, key=lambda column: column.header not in answers)

    def cells(self, between: str = " ± ") -> dict[str, list[str]]:
        """Return the columns of numbers as text by header, and that of the number of seeds if it differs."""
        texts: dict[str, list[str]] = {}
        for column in self.columns:
            texts[column.header] = []
            for cell in column.cells:
                text = "-"
                if cell is not None:
                    text = cell.text(between)
                texts[column.header].append(text)
        return self.with_seeds(texts)

    def with_seeds(self, columns: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return `columns`, with the number of seeds if it differs between rows."""
        if self.same_seeds is not None:
            return columns
        return columns | {_SEEDS: [str(seeds) for seeds in self.seeds]}


class Stars(NamedTuple):
    """Stars of significance.

    Attributes:
        against: The name of the method with which the others are compared.
        test: The test and its correction, in words.
        marks: The stars of methods by their `order`.
        p_values: The p-values after Holm's correction, by `order`.
    """

    against: str = ""
    test: str = ""
    marks: Mapping[int, str] = MappingProxyType({})
    p_values: Mapping[int, str] = MappingProxyType({})


def make_table(rows: pd.DataFrame, metric: str, stars: Stars | None = None) -> ResultTable:
    """Return a table of `rows`, which are rows of `Summary.rows` with the same experiment, metric, split and rule.

    The columns are the domains, unless there are more than `FEW_CLIENTS`, the mean over clients, the best and the worst
    tenth of many clients, and the worst client. The mean is left out if it repeats a single domain, and the worst
    client if it repeats another column. `stars` mark the column of means.
    """
    groups: dict[int, pd.DataFrame] = {}
    for order, group in rows.groupby("order"):
        groups[int(order)] = group.set_index("quantity")
    first = [group.iloc[0] for group in groups.values()]
    seeds = []
    for group in groups.values():
        seeds.append(int(group.loc["mean", "seeds"]))

    domains, remarks = _domains_with_columns(rows)
    columns = _columns(rows, groups, domains, metric)
    remarks += _remove_repeated(columns, domains)
    remarks += _fewer_seeds(columns.values(), seeds)
    if stars:
        shown = "mean"
        if "mean" not in columns:
            shown = domains[0]
        columns[shown] = _with_stars(columns[shown], list(groups), stars)
    return ResultTable(
        algorithms=[str(row["algorithm"]) for row in first],
        hyperparameters=[str(row["hyperparameters"]) for row in first],
        chosen=_chosen_among_several(rows, first),
        columns=list(columns.values()),
        seeds=seeds,
        orders=list(groups),
        remarks=remarks,
        has_rejected=not all(_not_rejected(rows)),
    )


def _chosen_among_several(rows: pd.DataFrame, first: Sequence[pd.Series]) -> list[bool]:
    counts = rows.groupby("algorithm")["order"].nunique()
    return [bool(row["chosen"] and counts[row["algorithm"]] > 1) for row in first]


def _not_rejected(rows: pd.DataFrame) -> list[bool]:
    """Return, for each group in order, whether validation chose it or there was nothing to choose."""
    groups = rows.drop_duplicates("order").sort_values("order")
    is_alone = ~groups["algorithm"].duplicated(keep=False)
    return list(groups["chosen"] | is_alone)


def _domains_with_columns(rows: pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the quantities of the domains that have columns, and a remark if there are too many."""
    quantities = set(rows["quantity"])
    domains = sorted((name for name in quantities if name.startswith(DOMAIN)), key=_number_key)
    if len(domains) <= FEW_CLIENTS:
        return domains, []
    return [], [f"The {len(domains)} domains have no columns here; --format csv has them."]


def _columns(
    rows: pd.DataFrame, groups: Mapping[int, pd.DataFrame], domains: Sequence[str], metric: str
) -> dict[str, ResultColumn]:
    """Return the columns of a table by quantity."""
    headers = {name: _domain_header(name) for name in domains}
    present = set(rows["quantity"])
    for name, header in _LAST.items():
        if name in present:
            headers[name] = header
    higher_is_better = bool(rows["higher_is_better"].iloc[0])
    chosen = _not_rejected(rows)
    columns = {}
    for name, header in headers.items():
        cells = []
        for group in groups.values():
            cells.append(_cell(group, name, metric))
        columns[name] = ResultColumn(header, _ranked(cells, chosen, higher_is_better))
    return columns


def _with_stars(column: ResultColumn, orders: Sequence[int], stars: Stars) -> ResultColumn:
    cells: list[Cell | None] = []
    for order, cell in zip(orders, column.cells, strict=True):
        if cell is not None:
            cell = replace(cell, stars=stars.marks.get(order, ""))
        cells.append(cell)
    return column._replace(cells=cells)


def _remove_repeated(columns: dict[str, ResultColumn], domains: Sequence[str]) -> list[str]:
    """Remove the columns that repeat another column, and return a sentence on each that a reader would look for."""
    remarks = []
    for name in ("worst", "mean"):
        if name == "mean" and len(domains) != 1:
            continue  # the mean of several domains equals one of them only by coincidence
        repeated = _column_like(columns, name)
        if repeated is None:
            continue
        header = columns.pop(name).header
        if len(domains) > 1 or "worst10" in columns:
            remarks.append(f"{header}: the same as {repeated} in every row.")
    return remarks


def _column_like(columns: Mapping[str, ResultColumn], name: str) -> str | None:
    """Return the header of a column with the same cells as the column `name`; only domains are like the mean."""
    for other, column in columns.items():
        is_candidate = other.startswith(DOMAIN) or (name == "worst" and other != name)
        if is_candidate and column.cells == columns[name].cells:
            return column.header
    return None


def _domain_header(quantity: str) -> str:
    """Return the name of a domain; "domain X" where X is a header that every table has."""
    domain = quantity.removeprefix(DOMAIN)
    if domain in (_SEEDS, *_LAST.values()):
        return f"domain {domain}"
    return domain


def _cell(group: pd.DataFrame, quantity: str, metric: str) -> Cell | None:
    if quantity not in group.index:
        return None
    row = group.loc[quantity]
    mean = float(row["mean"])
    scale = 1
    decimals = _decimals(mean)
    if is_fraction(metric):
        scale = 100
        decimals = 2
    sd = None
    if not math.isnan(row["sd"]):
        sd = scale * float(row["sd"])
    return Cell(scale * mean, sd, decimals, seeds=int(row["seeds"]))


def _fewer_seeds(columns: Iterable[ResultColumn], seeds: Sequence[int]) -> list[str]:
    """Return a sentence on the columns whose cells have fewer seeds than their rows."""
    words = []
    for column in columns:
        of_cells = []
        fewer = False
        for cell, of_row in zip(column.cells, seeds, strict=True):
            if cell is not None:
                of_cells.append(cell.seeds)
                fewer = fewer or cell.seeds < of_row
        if fewer:
            words.append(f"{column.header} {_span(of_cells)}")
    if not words:
        return []
    return [f"Columns with values of fewer seeds: {', '.join(words)}."]


def _span(numbers: Sequence[int]) -> str:
    least = min(numbers)
    most = max(numbers)
    if least == most:
        return str(least)
    return f"{least} to {most}"


def _ranked(cells: Sequence[Cell | None], chosen: Sequence[bool], higher_is_better: bool) -> list[Cell | None]:
    """Return `cells` with the ranks of the best and the second best, by the numbers as shown.

    Only the cells of `chosen` rows have ranks: the best of all rows would be chosen by the numbers that it is to show.
    """
    shown = set()
    for cell, has_rank in zip(cells, chosen, strict=True):
        if has_rank and cell is not None:
            shown.add(float(cell.number))
    ordered = sorted(shown, reverse=higher_is_better)
    if len(ordered) < 2:
        return list(cells)
    ranked: list[Cell | None] = []
    for cell, has_rank in zip(cells, chosen, strict=True):
        if has_rank and cell is not None and float(cell.number) in ordered[:2]:
            rank = 1 + ordered.index(float(cell.number))
            cell = replace(cell, rank=rank)
        ranked.append(cell)
    return ranked


def _decimals(mean: float) -> int:
    """Return the number of decimals that gives `mean` four significant digits."""
    if not math.isfinite(mean) or mean == 0:
        return 4
    digits = math.floor(math.log10(abs(mean)))
    return min(6, max(0, 3 - digits))


def _number_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts client_2 before client_10."""
    key = []
    for part in re.split(r"(\d+)", name):
        number = 0
        if part.isdigit():
            number = int(part)
        key.append((not part.isdigit(), number, part))
    return key
