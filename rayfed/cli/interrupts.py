"""Exit codes for Ctrl-C and SIGTERM, for output that nobody reads, as in `… | head`, and for output to a full disk.

None of them prints a traceback.
"""

import functools
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rayfed.core.errors import FULL
from rayfed.core.machine import on_sigterm

INTERRUPTED = 130  # the code with which a shell reports a command that SIGINT ended
TERMINATED = 143  # the same for SIGTERM
UNREAD = 141  # the same for SIGPIPE

Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Decorate `main(arguments)` so that it returns an exit code for these, and for argparse's SystemExit."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        received: list[int] = []

        def as_ctrl_c(number: int, frame: Any) -> None:
            received.append(number)
            handler = signal.getsignal(signal.SIGINT)
            (handler if callable(handler) else signal.default_int_handler)(number, frame)

        try:
            with on_sigterm(as_ctrl_c):
                try:
                    code = main(arguments)
                except SystemExit as done:  # argparse raises it after --help
                    code = int(done.code or 0)
                sys.stdout.flush()  # otherwise the interpreter would fail to flush at exit, and print so
        except BrokenPipeError:
            _discard_output()
            return UNREAD
        except OSError as error:
            if error.errno not in FULL:
                raise
            _discard_output()
            print(f"rayfed: {error.strerror}; the output is not complete", file=sys.stderr)
            return 1
        except KeyboardInterrupt as error:
            print(f"rayfed: {error.args[0] if error.args else 'interrupted'}", file=sys.stderr)
            code = INTERRUPTED
        return TERMINATED if code == INTERRUPTED and received else code

    return run


def _discard_output() -> None:
    """Discard what is still buffered, which the interpreter would fail to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
