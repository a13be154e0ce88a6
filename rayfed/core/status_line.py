"""A status line that is updated in place on a terminal and printed periodically elsewhere."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

LINE_SECONDS = 10.0  # least time between two lines if stderr is not a terminal


class StatusLine:
    """Show the latest of a series of lines: in place on a terminal, otherwise every `LINE_SECONDS` on stderr."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, transient=True) if self._console.is_terminal else None
        self._printed = time.monotonic()
        self._last = ""

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def show(self, line: str) -> None:
        now = time.monotonic()
        if self._live:
            self._live.update(Text(line, overflow="ellipsis", no_wrap=True))
        elif line != self._last and now - self._printed >= LINE_SECONDS:
            print(line, file=sys.stderr, flush=True)
            self._printed, self._last = now, line

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()
