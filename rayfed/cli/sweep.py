"""`rayfed sweep`: run a search space on Ray Tune."""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from rayfed.cli.arguments import add_values, files_of, packaged_spaces, pairs_of
from rayfed.cli.help import VALUES, config_keys, space_keys
from rayfed.cli.json_output import Document, add_json, table_rows, trial_rows, write_json
from rayfed.cli.main import INTERRUPTED
from rayfed.core.errors import UsageError
from rayfed.core.machine import importing
from rayfed.core.options import suggestion
from rayfed.core.paths import absolute, expanded
from rayfed.experiments.config import Config
from rayfed.experiments.sources import from_file
from rayfed.experiments.space import Space, configurations, read_space

_DESCRIPTION = """\
Run every configuration of a search space with every seed, as many trials at once as fit, and print a table of the
results. The exit code is 1 if a trial failed or diverged. Tune's files are in RESULTS/EXPERIMENT/tune.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [--dry-run] [--json] SPACE [KEY=VALUE ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{VALUES}\n{space_keys()}\n\n{config_keys()}"
    parser.description = _DESCRIPTION
    add_values(
        parser,
        "SPACE",
        "one search space, a YAML file or the name of a packaged space (rayfed list spaces), and values that override "
        "it in all arms",
    )
    add_json(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the trials, what each needs and how long they take"
    )


def execute(options: argparse.Namespace) -> int:
    files = files_of(options.values)
    if len(files) != 1:
        raise UsageError(f"expected one search space, such as demo or my_space.yaml, got {len(files)}")
    space = read_space(from_file(_space_file(files[0])), pairs_of(options.values))
    with importing():
        configs = configurations(space)  # imports torch
    if options.dry_run:
        from rayfed.experiments.forecast import sweep_text

        print(sweep_text(space, configs))
        return 0
    if options.json:
        return write_json("sweep", partial(_document, space, configs))
    code = _run(space, configs)
    try:
        print(_results(configs[0]))
    except UsageError as error:  # the trials are over, and the exit code says how they went
        print(f"no table: {error}")
    return code


def _run(space: Space, configs: Sequence[Config]) -> int:
    """Run the sweep, and return the exit code."""
    with importing():
        from rayfed.api import run_sweep

    try:
        return int(run_sweep(space, configs).failed > 0)
    except KeyboardInterrupt as error:
        if not error.args:
            raise  # nothing was started
        print(f"rayfed: {error}", file=sys.stderr)
        return INTERRUPTED


def _document(space: Space, configs: Sequence[Config]) -> Document:
    """Run the sweep, and return what `--json` writes of it."""
    code = _run(space, configs)
    results = configs[0].results
    experiment = configs[0].experiment
    tables = {"trials": trial_rows(results, experiment), "table": table_rows(results, experiment)}
    return code, {"results": results, "experiment": experiment, **tables}


def _space_file(given: str) -> Path:
    """Return the file of a search space that is given as a path or as the name of a packaged space."""
    path = expanded(given)
    if path.is_file() or path.name != given:
        return path
    spaces = packaged_spaces()
    name = given.removesuffix(".yaml")
    if name not in spaces:
        raise UsageError(f"{given}: no such file or packaged space; {suggestion(name, spaces)}")
    print(f"space: {spaces[name]}", file=sys.stderr)
    return spaces[name]


def _results(config: Config) -> str:
    """Return the report on the sweep, and plot its curves beside the tables."""
    from rayfed.records.storage import open_storage
    from rayfed.reports.charts import plot
    from rayfed.reports.read import read_by_data
    from rayfed.reports.render import render

    tables = read_by_data(config.results, config.experiment)
    text = render(config.results, config.experiment, tables=tables)
    if not (tables.trials["status"] == "done").any():
        return text
    home = open_storage(config.results).child(config.experiment)
    try:
        with tempfile.TemporaryDirectory() as folder:
            picture = Path(folder) / "curves.png"
            plot(tables, picture)
            home.write(picture.name, picture.read_bytes())
    except UsageError as error:
        return f"{text}\nno plot: {error}"
    except OSError as error:
        location = f"{config.results}/{config.experiment}/curves.png"
        return f"{text}\nno plot: {location}: cannot be written ({error.strerror or error})"
    folder = home.location
    if home.local:
        folder = str(absolute(folder))
    return f"{text}\nPlot: {folder}/curves.png"
