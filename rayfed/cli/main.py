"""The program `rayfed`: one parser with a subcommand per module of this package.

A command's module defines `configure(parser)`, which adds its arguments, and `execute(options) -> int`, which returns
the exit code. It is imported only when its command is given, and imports torch, which takes seconds, only when the
request is known to be sound.
"""

import argparse
import gc
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import rayfed
from rayfed.core.errors import BadHook, Diverged, HostLost, StorageError, UsageError, printable
from rayfed.core.machine import on_signal
from rayfed.core.substitutes import print_substitutes

INTERRUPTED = 130  # the code with which a shell reports a command that SIGINT ended
TERMINATED = 143  # the same for SIGTERM
UNREAD = 141  # the same for SIGPIPE
_OTHER_ENCODING = (
    f"this locale has another encoding, {sys.getfilesystemencoding()}; set PYTHONUTF8=1, or a locale of UTF-8, such as "
    "LC_ALL=C.UTF-8"
)

COMMANDS = {
    "run": "run one simulation",
    "sweep": "run a search space on Ray Tune",
    "report": "tabulate, plot and compare results",
    "partition": "show, save or draw which client holds which examples",
    "data": "say where datasets come from, and whether they are here",
    "list": "list algorithms, datasets, models, ... and search spaces",
    "new": "write a method, a dataset or a search space to start from",
    "check": "check that an algorithm keeps the contract with the engine",
    "doctor": "check this machine or cluster, with remedies",
    "docs": "list or print the pages of the documentation",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program with `arguments` (None: those of the process) and return its exit code.

    0: done; 1: something failed while running; 2: the request was refused; 130: interrupted; 141: the reader of the
    output has gone, as after `… | head`; 143: ended by SIGTERM.
    """
    print_substitutes()
    received: list[int] = []

    def as_ctrl_c(number: int, frame: Any) -> None:
        received.append(number)
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            handler(number, frame)
        else:
            signal.default_int_handler(number, frame)

    try:
        # SLURM, Kubernetes and `timeout` send SIGTERM; `timeout` sends it to the process and to its group
        with on_signal(signal.SIGTERM, as_ctrl_c, signal.SIG_IGN):
            try:
                if arguments is None:
                    arguments = sys.argv[1:]
                code = _code(list(arguments))
            except SystemExit as done:  # argparse raises it after --help
                code = int(done.code or 0)
            sys.stdout.flush()  # otherwise the interpreter would fail to flush at exit, and print so
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter would fail to write it at exit
        return UNREAD
    except KeyboardInterrupt as error:
        reason = "interrupted"
        if error.args:
            reason = str(error.args[0])
        code = INTERRUPTED
        if received:
            code = TERMINATED
        _say_error(arguments or [], code, reason)
    gc.freeze()  # otherwise the interpreter would search all modules for garbage at exit, for most of a second
    if code == INTERRUPTED and received:
        return TERMINATED
    return code


def _code(arguments: Sequence[str]) -> int:
    """Run the command of `arguments` and return its exit code; errors of rayfed's are printed in one line."""
    try:
        _refuse_undecoded(arguments)
        if not arguments:
            _program().print_help()
            return 2
        if arguments[0].startswith("-"):
            _refuse_unknown(_program(), _program().parse_known_args(arguments)[1] or arguments)
        return _execute(arguments[0], arguments[1:])
    except (UsageError, Diverged, HostLost, BadHook, StorageError) as error:
        code = 1
        if isinstance(error, UsageError):
            code = 2
        _say_error(arguments, code, str(error))
        return code
    except UnicodeEncodeError as error:
        if sys.getfilesystemencoding() == "utf-8":
            raise
        print(f"rayfed: {error.object}: {_OTHER_ENCODING}", file=sys.stderr)
        return 2


def _say_error(arguments: Sequence[str], code: int, error: str) -> None:
    """Print an error in one line, and with `--json` also the document that says it."""
    print(f"rayfed: {printable(error)}", file=sys.stderr)
    if "--json" in arguments:
        print(json.dumps({"command": arguments[0], "exit_code": code, "error": error}))


def _refuse_undecoded(arguments: Sequence[str]) -> None:
    """Raise UsageError for an argument that the locale could not decode, and that could not be recorded."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError as error:
            raise UsageError(f"{argument}: {_OTHER_ENCODING}") from error


def _program() -> Parser:
    """Return the parser of `rayfed` itself, for its help."""
    parser = Parser(
        prog="rayfed",
        usage="rayfed COMMAND ...",
        description="Simulate federated learning on non-IID data.",
        epilog="rayfed COMMAND --help describes a command, its arguments and its keys.",
    )
    parser.add_argument("--version", action="version", version=f"rayfed {rayfed.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND ...", parser_class=Parser)
    for name, summary in COMMANDS.items():
        commands.add_parser(name, help=summary)
    return parser


def _execute(name: str, arguments: Sequence[str]) -> int:
    if name not in COMMANDS:
        from rayfed.core.options import suggestion

        raise UsageError(f"{name}: no such command; {suggestion(name, COMMANDS)}")
    module = importlib.import_module(f"rayfed.cli.{name}")
    parser = Parser(prog=f"rayfed {name}")
    module.configure(parser)
    options, unknown = parser.parse_known_intermixed_args(arguments)
    _refuse_unknown(parser, unknown)
    return module.execute(options)


def _refuse_unknown(parser: Parser, unknown: Sequence[str]) -> None:
    """Raise UsageError if `unknown` holds arguments that `parser` does not have."""
    if not unknown:
        return
    from rayfed.core.options import suggestion

    first = unknown[0]
    key = unknown[0].lstrip("-")
    if not first.startswith("-"):
        raise UsageError(f"{first}: unexpected argument; see {parser.prog} --help")
    if "=" in key:
        raise UsageError(f"{first}: a key is written without dashes: {key}")
    options: list[str] = []
    for action in parser._actions:
        options.extend(action.option_strings)
    raise UsageError(f"{first}: no such option of {parser.prog}; {suggestion(first, options)}")
