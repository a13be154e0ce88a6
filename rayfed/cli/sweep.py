"""Run a sweep on Ray Tune: `python -m rayfed.sweep space.yaml [key=value …]`."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rayfed.api import sweep
from rayfed.cli.help import usage
from rayfed.cli.interrupts import INTERRUPTED, command
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_arguments, from_file
from rayfed.experiments.space import read_space
from rayfed.results.read import read
from rayfed.results.report import plot, render


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code: 0 done, 1 some trials went wrong, 2 it could not be started,
    130 it was interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments) or not arguments:
        print(usage())
        return 0 if arguments else 2
    try:
        files = [argument for argument in arguments if "=" not in argument]
        if len(files) != 1:
            raise UsageError(f"expected one space file, such as tune_spaces/adcol.yaml, got {len(files)}")
        space = read_space(from_file(files[0]), from_arguments([a for a in arguments if "=" in a]))
        code = 1 if sweep(space) else 0
    except UsageError as error:
        print(f"rayfed: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        if not error.args:
            raise  # nothing was started
        print(f"rayfed: {error}", file=sys.stderr)
        code = INTERRUPTED
    config = Config.read(next(space.trials()))
    try:
        print(_shown(config))
    except UsageError as error:  # the trials are over: what they are worth is for the exit code to say, not this
        print(f"no table: {error}")
    return code


def _shown(config: Config) -> str:
    """The report on the sweep, and a plot of it beside the tables."""
    text = render(config.results, config.experiment)
    tables = read(config.results, config.experiment)
    if not (tables.trials["status"] == "done").any():
        return text
    picture = Path(config.results) / config.experiment / "curves.png"
    try:
        plot(tables, picture)
    except UsageError as error:
        return f"{text}\nno plot: {error}"
    return f"{text}\nPlot: {picture}"


if __name__ == "__main__":
    sys.exit(main())
