"""Tables for a terminal of any width."""

import re
from collections.abc import Sequence

from rich.cells import cell_len

from rayfed.core.plain_table import BLANK, Column, format_table, widest
from rayfed.reports.result_table import CHOSEN, ResultTable

_HYPERPARAMETERS_WIDTH = 30  # longer hyperparameters are wrapped
_HEADER_WIDTH = 12  # longer headers are wrapped where a name can be parted, unless their cells are as wide


def text_table(table: ResultTable, *, width: int) -> str:
    """Return `table` at most `width` characters wide if possible.

    Mean and sd are on one line if the width allows it, otherwise on two. Columns that still do not fit follow in
    further tables, which repeat the names of the rows.
    """
    labels = [Column("algorithm", _without_repeats(table.algorithms), right=False)]
    if any(table.hyperparameters):
        marks = [f" {CHOSEN}" if chosen else "" for chosen in table.chosen]
        cells = [_wrapped(text) + mark for text, mark in zip(table.hyperparameters, marks, strict=True)]
        labels.append(Column("hyperparameters", cells, right=False))
    room = width - sum(column.width for column in labels)
    for between in (" ± ", "\n± "):
        numbers = [
            Column(_wrapped_header(name, cells), _aligned(cells)) for name, cells in table.cells(between).items()
        ]
        if sum(column.width for column in numbers) <= room:
            break
    tables: list[list[Column]] = [[]]
    for column in numbers:
        if tables[-1] and sum(other.width for other in [*tables[-1], column]) > room:
            tables.append([])
        tables[-1].append(column)
    return "\n\n".join(format_table([*labels, *columns], width) for columns in tables)


def _aligned(cells: Sequence[str]) -> list[str]:
    """Return cells that are padded to the right where others have stars, so that their numbers are aligned."""
    numbers = [cell.rstrip("*") for cell in cells]
    stars = max(len(cell) - len(number) for cell, number in zip(cells, numbers, strict=True))
    return [cell + BLANK * (stars - len(cell) + len(number)) for cell, number in zip(cells, numbers, strict=True)]


def _without_repeats(names: Sequence[str]) -> list[str]:
    return [name if index == 0 or names[index - 1] != name else "" for index, name in enumerate(names)]


def _wrapped(hyperparameters: str) -> str:
    return _filled(re.split(r"(?<=,) ", hyperparameters), _HYPERPARAMETERS_WIDTH, " ")


def _wrapped_header(name: str, cells: Sequence[str]) -> str:
    """Return the header on several lines, parted after _ - / or a space, if it is wider than its cells."""
    return _filled(re.split(r"(?<=[_\-/ ])", name), max(_HEADER_WIDTH, widest(cells)), "")


def _filled(parts: Sequence[str], width: int, between: str) -> str:
    lines = [parts[0]]
    for part in parts[1:]:
        if cell_len(f"{lines[-1]}{between}{part}".rstrip()) > width:
            lines.append(part)
        else:
            lines[-1] += f"{between}{part}"
    return "\n".join(line.rstrip() for line in lines)
