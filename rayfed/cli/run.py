"""One simulation from the command line: `python -m rayfed.run [file.yaml …] [key=value …]`; --help tells the keys."""

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from rayfed.api import run
from rayfed.cli.help import listing, usage
from rayfed.cli.interrupts import command
from rayfed.core.errors import BadHook, Diverged, HostLost, UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments, from_file


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 it went wrong on the way, 2 it could not be started,
    130 it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        print(usage())
        return 0
    if "--list" in arguments:
        print(listing())
        return 0
    try:
        files = [argument for argument in arguments if "=" not in argument]
        values = from_arguments([argument for argument in arguments if "=" in argument])
        result = run(Config.read(*map(from_file, files), values), quiet=False)
    except UsageError as error:
        print(f"rayfed: {error}", file=sys.stderr)
        return 2
    except (Diverged, HostLost, BadHook) as error:
        print(f"rayfed: {error}", file=sys.stderr)
        return 1
    from rayfed.results.report import render

    try:
        print(render(result.folder.parent, result.folder.name))
    except UsageError as error:  # of a run that is done, with nothing scored that a table could show
        print(f"no table: {error}")
    print(f"weights {result.weights_hash}")
    return 0


class _Callable(ModuleType):
    """Importing this module hides the function `rayfed.run` behind its name, so the module can be called as well."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable

if __name__ == "__main__":
    sys.exit(main())
