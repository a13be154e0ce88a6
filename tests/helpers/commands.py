"""The program's commands as functions."""

from collections.abc import Callable, Sequence

from rayfed.cli.main import main


def command(name: str) -> Callable[[Sequence[str]], int]:
    """Return the command `rayfed NAME` as a function from its arguments to its exit code."""
    return lambda arguments: main([name, *arguments])
