"""How SIGTERM ends a command that waits for processes of Ray."""

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any


def ended_by(line: Callable[[], str]) -> Callable[[int, Any], None]:
    """Return a handler of a signal that ends this process at once, after it has printed a line.

    SLURM and `timeout` signal the processes of Ray, too. An orderly end would print pages of their errors.

    Args:
        line: Returns what to print.
    """

    def end(number: int, frame: Any) -> None:
        last = line()
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[2K\x1b[?25h")  # clears the line of progress, and shows the cursor again
        print(f"rayfed: {last}", file=sys.stderr, flush=True)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(128 + number)

    return end
