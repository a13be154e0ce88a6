"""How Ctrl-C and SIGTERM end a command that waits for processes of Ray."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rayfed.core.machine import on_signal


@contextlib.contextmanager
def handled_signals(note_ctrl_c: Callable[[], None], last_line: Callable[[], str]) -> Iterator[None]:
    """In this block, note the first Ctrl-C, and end this process at once at SIGTERM.

    A second Ctrl-C raises KeyboardInterrupt.

    Args:
        note_ctrl_c: Is called at the first Ctrl-C. The command then ends in its own time.
        last_line: Returns what is printed at SIGTERM.
    """
    sigterm = on_signal(signal.SIGTERM, _ended_by(last_line), signal.SIG_IGN)
    ctrl_c = on_signal(signal.SIGINT, lambda number, frame: note_ctrl_c(), signal.default_int_handler)
    with sigterm, ctrl_c:
        yield


def _ended_by(line: Callable[[], str]) -> Callable[[int, Any], None]:
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
