"""What all commands share: a reader that has gone, as in `… | head`, and Ctrl-C end them without a traceback."""

import functools
import os
import sys
from collections.abc import Callable, Sequence

INTERRUPTED = 130  # as a shell says of a command that SIGINT ended
UNREAD = 141  # and of one that SIGPIPE ended

Main = Callable[..., int]


def command(main: Main) -> Main:
    """`main(arguments)`, with those two as exit codes."""

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        try:
            try:
                code = main(arguments)
            except SystemExit as done:  # argparse's, after --help
                code = int(done.code or 0)
            sys.stdout.flush()  # or the interpreter would find out at its exit, and say so
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left goes nowhere
            return UNREAD
        except KeyboardInterrupt as error:
            print(f"rayfed: {error.args[0] if error.args else 'interrupted'}", file=sys.stderr)
            return INTERRUPTED
        return code

    return run
