"""Tables of text for a terminal."""

import io
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

PADDING = 2
"""Spaces between two columns, one of which the box adds."""
BLANK = "\u2800"
"""A space that rich does not strip."""


class Column(NamedTuple):
    """A column of strings, aligned to the right or to the left."""

    header: str
    cells: list[str]
    right: bool = True

    @property
    def width(self) -> int:
        """The characters that it takes with the space after it."""
        return widest([self.header, *self.cells]) + PADDING


def plain_table(columns: Mapping[str, Sequence[str]], *, left: Sequence[str], width: int) -> str:
    """Return a table of strings by header; columns named in `left` are aligned left."""
    return format_table([Column(name, list(cells), right=name not in left) for name, cells in columns.items()], width)


def format_table(columns: list[Column], width: int) -> str:
    """Return the columns as a table at most `width` characters wide, in which longer cells are folded."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, PADDING - 1, 0, 0))
    for column in columns:
        table.add_column(column.header, justify="right" if column.right else "left", overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    console.is_jupyter = False  # otherwise it would display the table at once in a notebook, and write nothing to `out`
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().replace(BLANK, " ").rstrip().splitlines())


def widest(texts: Sequence[str]) -> int:
    """Return the greatest width of a line of `texts`."""
    return max(cell_len(line) for text in texts for line in text.split("\n"))
