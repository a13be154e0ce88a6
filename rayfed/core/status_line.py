"""Progress that is updated in place on a terminal and in a notebook, and printed now and then anywhere else."""

import html
import importlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

LINE_SECONDS = 10.0  # least time between two lines where they cannot be replaced
_BAR = 24  # the most columns of a bar


@dataclass(frozen=True)
class Bar:
    """One line of progress: `label` `done`/`total`, and words about it."""

    label: str
    done: float
    total: float
    words: str = ""

    @property
    def count(self) -> str:
        return f"{self.label} {self.done:g}/{self.total:g}"

    @property
    def text(self) -> str:
        return f"{self.count} · {self.words}" if self.words else self.count


def is_watched() -> bool:
    """Return whether somebody sees what is shown: stderr is a terminal, or this is a notebook."""
    return sys.stderr.isatty() or _in_notebook()


class StatusLine:
    """Show the latest of a series of states, each a line of text or some bars.

    On a terminal and in a notebook, they replace each other; lines are cut at the width of the terminal. Elsewhere, as
    in a log file, a plain line is printed every `LINE_SECONDS`.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._notebook = _Notebook() if _in_notebook() else None
        if self._notebook is None and sys.stderr.isatty():
            from rich.console import Console
            from rich.live import Live

            console = Console(stderr=True)
            self._live = Live(console=console, transient=True) if console.is_terminal else None
        self._printed = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def show(self, state: str | Sequence[Bar]) -> None:
        now = time.monotonic()
        text = state if isinstance(state, str) else " · ".join(bar.text for bar in state)
        if self._live:
            self._live.update(_rendered(state, self._live.console.width))
        elif self._notebook:
            self._notebook.show(state)
        elif text != self._last and now - self._printed >= LINE_SECONDS:
            print(text, file=sys.stderr, flush=True)
            self._printed, self._last = now, text

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
        if self._notebook:
            self._notebook.clear()


def _rendered(state: str | Sequence[Bar], width: int) -> Any:
    """Return `state` for a terminal of `width` columns."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    if isinstance(state, str):
        return Text(state, overflow="ellipsis", no_wrap=True)
    counts, columns = max(len(bar.count) for bar in state), min(_BAR, max(4, width // 5))
    grid = Table.grid(padding=(0, 1, 0, 0))
    for column in (counts, columns, None):
        grid.add_column(no_wrap=True, width=column)
    for bar in state:
        words = Text(bar.words)
        words.truncate(max(1, width - counts - columns - 2), overflow="ellipsis")
        grid.add_row(bar.count, ProgressBar(total=max(bar.total, 1), completed=bar.done, width=columns), words)
    return grid


def _in_notebook() -> bool:
    """Return whether this process runs the cells of a notebook. IPython in a terminal does not count."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


class _Notebook:
    """One output of the cell, replaced in place."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, state: str | Sequence[Bar]) -> None:
        if isinstance(state, str):
            content = html.escape(state)
        else:
            content = "<br>".join(
                f'<progress value="{bar.done:g}" max="{max(bar.total, 1):g}"></progress> {html.escape(bar.text)}'
                for bar in state
            )
        self._display(content)

    def clear(self) -> None:
        if self._handle is not None:
            self._display("")

    def _display(self, content: str) -> None:
        display: Any = importlib.import_module("IPython.display")  # IPython has no types

        output = display.HTML(content)
        if self._handle is None:
            self._handle = display.display(output, display_id=True)
        else:
            self._handle.update(output)
