"""Exit codes for Ctrl-C, for output that nobody reads any more, as in `… | head`, and for output to a full disk.

None of them prints a traceback.
"""

import functools
import os
import sys
from collections.abc import Callable, Sequence

from rayfed.core.errors import FULL

INTERRUPTED = 130  # the code with which a shell reports a command that SIGINT ended
UNREAD = 141  # the same for SIGPIPE

Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """Decorate `main(arguments)` so that it returns an exit code for these, and for argparse's SystemExit."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
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
            return INTERRUPTED
        return code

    return run


def _discard_output() -> None:
    """Discard what is still buffered, which the interpreter would fail to write at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
