"""What a command shows: tables of text, and progress.

Progress is updated in place on a terminal and in a notebook, and printed now and then anywhere else. rich is imported
where it is used, because most commands that show nothing import this module too.
"""

import html
import importlib
import io
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

LINE_SECONDS = 10.0  # least time between two lines where they cannot be replaced
_BAR = 24  # the most columns of a bar
_PADDING = 2  # spaces between two columns of a table; the box adds the second
BLANK = "\u2800"
"""A space that rich does not strip."""


class Column(NamedTuple):
    """A column of strings, aligned to the right or to the left."""

    header: str
    cells: list[str]
    right: bool = True

    @property
    def width(self) -> int:
        """The number of characters that the column takes with the space after it."""
        return widest([self.header, *self.cells]) + _PADDING


def plain_table(columns: Mapping[str, Sequence[str]], *, left: Sequence[str], width: int) -> str:
    """Return a table of strings by header; columns named in `left` are aligned left."""
    table = []
    for name, cells in columns.items():
        table.append(Column(name, list(cells), right=name not in left))
    return format_table(table, width)


def format_table(columns: list[Column], width: int) -> str:
    """Return the columns as a table at most `width` characters wide, in which longer cells are folded."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    padding = (0, _PADDING - 1, 0, 0)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for column in columns:
        side: Literal["left", "right"] = "left"
        if column.right:
            side = "right"
        table.add_column(column.header, justify=side, overflow="fold")
    for cells in zip(*(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    out = io.StringIO()
    console = Console(file=out, width=width, color_system=None, markup=False, highlight=False, emoji=False)
    console.is_jupyter = False  # in a notebook, it would display the table at once and write nothing to `out`
    console.print(table)
    text = out.getvalue().replace(BLANK, " ").rstrip()
    return "\n".join(line.rstrip() for line in text.splitlines())


def widest(texts: Sequence[str]) -> int:
    """Return the greatest width of a line of `texts`."""
    from rich.cells import cell_len

    lines = "\n".join(texts).split("\n")
    return max(map(cell_len, lines))


@dataclass(frozen=True)
class Bar:
    """One line of progress: `label done/total · words`, with a bar where there is room for it."""

    label: str
    done: float
    total: float
    words: str = ""

    @property
    def count(self) -> str:
        return f"{self.label} {self.done:g}/{self.total:g}"

    @property
    def text(self) -> str:
        if self.words:
            return f"{self.count} · {self.words}"
        return self.count


def is_watched() -> bool:
    """Return whether somebody watches: stderr is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or _in_notebook()


class StatusLine:
    """Shows the present state, a line of text or several bars.

    On a terminal and in a notebook, a state replaces the one before it; lines are cut at the width of the terminal.
    Elsewhere, as in a log file, a plain line is printed every `LINE_SECONDS`.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._cell: Any = None  # the output of a notebook's cell, once there is one
        if not _in_notebook() and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            if console.is_terminal:
                self._live = Live(console=console, transient=True)
        self._printed = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def show(self, state: str | Sequence[Bar]) -> None:
        now = time.monotonic()
        if isinstance(state, str):
            lines = [state]
        else:
            lines = [bar.text for bar in state]
        text = " · ".join(lines)
        if self._live:
            self._live.update(_rendered(state, self._live.console.width))
        elif _in_notebook():
            display: Any = importlib.import_module("IPython.display")  # IPython has no types
            self._cell = self._cell or display.display(display.HTML(""), display_id=True)
            page = "<br>".join(map(html.escape, lines))
            self._cell.update(display.HTML(page))
        elif text != self._last and now - self._printed >= LINE_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self._printed = now
            self._last = text

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()
        if self._cell:
            self._cell.update(importlib.import_module("IPython.display").HTML(""))


def _rendered(state: str | Sequence[Bar], width: int) -> Any:
    """Return `state` for a terminal of `width` columns."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if isinstance(state, str):
        return Text(state, overflow="ellipsis", no_wrap=True)
    counts = max(len(bar.count) for bar in state)
    columns = min(_BAR, max(4, width // 5))
    grid = Table.grid(padding=(0, 1, 0, 0))
    for column in (counts, columns, None):
        grid.add_column(no_wrap=True, width=column)
    for bar in state:
        words = Text(bar.words)
        room = width - counts - columns - 2
        words.truncate(max(1, room), overflow="ellipsis")
        progress = ProgressBar(total=max(bar.total, 1), completed=bar.done, width=columns)
        grid.add_row(bar.count, progress, words)
    return grid


def _in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook. IPython in a terminal does not count."""
    ipython = sys.modules.get("IPython")
    shell = None
    if ipython is not None:
        shell = ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config
