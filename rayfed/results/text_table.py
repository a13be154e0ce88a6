"""Tables for a terminal of any width."""

import io
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from rayfed.results.result_table import CHOSEN, ResultTable

_PADDING = 2  # spaces between two columns, one of which the box adds
_HYPERPARAMETERS_WIDTH = 30  # longer hyperparameters are wrapped
_BLANK = "\u2800"  # a space that rich does not strip
_HEADER_WIDTH = 12  # longer headers are wrapped where a name can be parted, unless their cells are as wide


class _Column(NamedTuple):
    header: str
    cells: list[str]
    right: bool = True

    @property
    def width(self) -> int:
        return _widest([self.header, *self.cells]) + _PADDING


def text_table(table: ResultTable, *, width: int) -> str:
    """Return `table` at most `width` characters wide if possible.

    Mean and sd are on one line if the width allows it, otherwise on two. Columns that still do not fit follow in
    further tables, which repeat the names of the rows.
    """
    labels = [_Column("algorithm", _without_repeats(table.algorithms), right=False)]
    if any(table.hyperparameters):
        marks = [f" {CHOSEN}" if chosen else "" for chosen in table.chosen]
        cells = [_wrapped(text) + mark for text, mark in zip(table.hyperparameters, marks, strict=True)]
        labels.append(_Column("hyperparameters", cells, right=False))
    room = width - sum(column.width for column in labels)
    for between in (" ± ", "\n± "):
        numbers = [
            _Column(_wrapped_header(name, cells), _aligned(cells)) for name, cells in table.cells(between).items()
        ]
        if sum(column.width for column in numbers) <= room:
            break
    tables: list[list[_Column]] = [[]]
    for column in numbers:
        if tables[-1] and sum(other.width for other in [*tables[-1], column]) > room:
            tables.append([])
        tables[-1].append(column)
    return "\n\n".join(_format_table([*labels, *columns], width) for columns in tables)


def plain_table(columns: Mapping[str, Sequence[str]], *, left: Sequence[str], width: int) -> str:
    """Return a table of strings by header; columns named in `left` are aligned left."""
    return _format_table([_Column(name, list(cells), right=name not in left) for name, cells in columns.items()], width)


def _aligned(cells: Sequence[str]) -> list[str]:
    """Return cells that are padded to the right where others have stars, so that their numbers are aligned."""
    numbers = [cell.rstrip("*") for cell in cells]
    stars = max(len(cell) - len(number) for cell, number in zip(cells, numbers, strict=True))
    return [cell + _BLANK * (stars - len(cell) + len(number)) for cell, number in zip(cells, numbers, strict=True)]


def _widest(texts: Sequence[str]) -> int:
    return max(cell_len(line) for text in texts for line in text.split("\n"))


def _without_repeats(names: Sequence[str]) -> list[str]:
    return [name if index == 0 or names[index - 1] != name else "" for index, name in enumerate(names)]


def _wrapped(hyperparameters: str) -> str:
    return _filled(re.split(r"(?<=,) ", hyperparameters), _HYPERPARAMETERS_WIDTH, " ")


def _wrapped_header(name: str, cells: Sequence[str]) -> str:
    """Return the header on several lines, parted after _ - / or a space, if it is wider than its cells."""
    return _filled(re.split(r"(?<=[_\-/ ])", name), max(_HEADER_WIDTH, _widest(cells)), "")


def _filled(parts: Sequence[str], width: int, between: str) -> str:
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]}{between}{part}".rstrip()) > width:
            lines.append(part)
        else:
            lines[-1] += f"{between}{part}"
    return "\n".join(line.rstrip() for line in lines)


def _format_table(columns: list[_Column], width: int) -> str:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, _PADDING - 1, 0, 0))
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    console.is_jupyter = False  # in a notebook, it would display the table at once and write nothing to `out`
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().replace(_BLANK, " ").rstrip().splitlines())
