"""Text tables of the summary for a terminal of any width, with accuracies in percent."""

import io
import math
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from rayfed.results.metric_names import is_fraction
from rayfed.results.selection import DOMAIN

_PADDING = 2  # spaces between two columns, one of which the box adds
_HYPERPARAMETERS_WIDTH = 30  # longer hyperparameters are wrapped


class _Column(NamedTuple):
    header: str
    cells: list[str]
    right: bool = True

    @property
    def width(self) -> int:
        lines = [line for cell in [self.header, *self.cells] for line in cell.split("\n")]
        return max(map(cell_len, lines)) + _PADDING


def summary_table(rows: pd.DataFrame, metric: str, *, width: int) -> str:
    """Return `rows` of one experiment, metric, split and rule as a table, at most `width` characters wide if possible.

    There is a column for each domain, then the mean over clients, the worst client and the number of seeds. Mean and sd
    are on one line if the width allows it, otherwise on two. Domains that still do not fit follow in further tables.
    """
    groups = {order: group.set_index("quantity") for order, group in rows.groupby("order")}
    first = [group.iloc[0] for group in groups.values()]
    labels = [_Column("algorithm", _without_repeats([str(row["algorithm"]) for row in first]), right=False)]
    if any(row["hyperparameters"] for row in first):
        counts = rows.groupby("algorithm")["order"].nunique()
        marks = [" *" if row["chosen"] and counts[row["algorithm"]] > 1 else "" for row in first]
        cells = [_wrapped(row["hyperparameters"]) + mark for row, mark in zip(first, marks, strict=True)]
        labels.append(_Column("hyperparameters", cells, right=False))

    domains = sorted({name for name in rows["quantity"] if name.startswith(DOMAIN)}, key=_number_key)
    for between in (" ± ", "\n± "):
        numbers = {
            name: _Column(header, [_cell(group, name, metric, between) for group in groups.values()])
            for name, header in [*((name, name.removeprefix(DOMAIN)) for name in domains), *_LAST]
        }
        seeds = _Column("seeds", [str(int(group.loc["mean", "seeds"])) for group in groups.values()])
        tail = [*(numbers[name] for name, _ in _LAST), seeds]
        room = width - sum(column.width for column in [*labels, *tail])
        if sum(numbers[name].width for name in domains) <= room:
            break
    tables = []
    shown: list[_Column] = []
    for name in domains:
        if shown and sum(column.width for column in [*shown, numbers[name]]) > room:
            tables.append([*labels, *shown])
            shown = []
            room = width - sum(column.width for column in labels)
        shown.append(numbers[name])
    tables.append([*labels, *shown])
    tables[0].extend(tail)
    return "\n\n".join(_format_table(columns, width) for columns in tables)


def plain_table(columns: Mapping[str, Sequence[str]], *, left: Sequence[str], width: int) -> str:
    """Return a table of strings by header; columns named in `left` are aligned left."""
    return _format_table([_Column(name, list(cells), right=name not in left) for name, cells in columns.items()], width)


_LAST = (("mean", "AVG"), ("worst", "worst"))


def _cell(group: pd.DataFrame, quantity: str, metric: str, between: str) -> str:
    if quantity not in group.index:
        return "-"
    mean, sd = group.loc[quantity, "mean"], group.loc[quantity, "sd"]
    scale, decimals = (100, 2) if is_fraction(metric) else (1, _decimals(mean))
    spread = f"{scale * sd:.{decimals}f}" if sd == sd else "-"  # NaN for one seed
    return f"{scale * mean:.{decimals}f}{between}{spread}"


def _decimals(mean: float) -> int:
    """Return the decimals that give `mean` four significant digits, so that mean and sd have the same decimals."""
    if not math.isfinite(mean) or mean == 0:
        return 4
    return min(6, max(0, 3 - math.floor(math.log10(abs(mean)))))


def _number_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a key that sorts client_2 before client_10."""
    return [(not part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]


def _without_repeats(names: Sequence[str]) -> list[str]:
    return [name if index == 0 or names[index - 1] != name else "" for index, name in enumerate(names)]


def _wrapped(hyperparameters: str) -> str:
    lines = [""]
    for part in hyperparameters.split(", "):
        if lines[-1] and cell_len(f"{lines[-1]}, {part}") > _HYPERPARAMETERS_WIDTH:
            lines[-1] += ","
            lines.append(part)
        else:
            lines[-1] += f", {part}" if lines[-1] else part
    return "\n".join(lines)


def _format_table(columns: list[_Column], width: int) -> str:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _PADDING - 1, 0, 0))
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
