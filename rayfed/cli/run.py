"""`rayfed run`: run one simulation."""

import argparse
import sys
from functools import partial

from rayfed.cli.arguments import add_values, files_of, packaged_spaces, read_values, start_ray_meanwhile
from rayfed.cli.help import VALUES, config_keys
from rayfed.cli.json_output import Document, add_json, table_rows, trial_rows, write_json
from rayfed.core.errors import UsageError, error_line
from rayfed.core.machine import importing
from rayfed.core.paths import expanded
from rayfed.experiments.config import Config

_DESCRIPTION = """\
Run one simulation and print a table of its results and a hash of its final state.
A summary of the plan and the progress are printed to stderr.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = f"{parser.prog} [--dry-run] [--json] [FILE.yaml ...] [KEY=VALUE ...]"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"{VALUES}\n{config_keys()}"
    parser.description = _DESCRIPTION
    add_values(parser, "FILE.yaml", "YAML files and single values of the configuration")
    add_json(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would run, what it needs and how long it takes"
    )


def execute(options: argparse.Namespace) -> int:
    spaces = packaged_spaces()
    for name in files_of(options.values):
        if name in spaces and not expanded(name).is_file():
            raise UsageError(f"{name}: a packaged search space; rayfed sweep {name} runs it")
    sources = read_values(options.values)
    if not options.dry_run:
        start_ray_meanwhile(sources)
    with importing():
        config = Config.read(*sources)  # imports torch
    if options.dry_run:
        from rayfed.experiments.forecast import run_text
        from rayfed.experiments.plan import make_plan

        print(run_text(make_plan(config)))
        return 0
    if options.json:
        return write_json("run", partial(_document, config))
    with importing():
        from rayfed.api import run
        from rayfed.reports.render import render

    try:
        result = run(config, quiet=False, keep_state=False)
    except Exception as error:
        notes = getattr(error, "__notes__", [])
        if not notes:
            raise
        print(f"rayfed: {error_line(error)}; {notes[-1]}", file=sys.stderr)
        return 1
    try:
        print(render(config.results, config.experiment))
    except UsageError as error:  # the run is done, but nothing was scored that a table could show
        print(f"no table: {error}")
    print(f"weights {result.weights_hash}")
    return 0


def _document(config: Config) -> Document:
    """Run the simulation, and return what `--json` writes of it."""
    from rayfed.api import run

    result = run(config, quiet=False, keep_state=False)
    of_trial = [row for row in trial_rows(config.results, config.experiment) if row["trial"] == result.trial]
    content = {"results": config.results, "experiment": config.experiment, "trial": of_trial[0]}
    return 0, content | {"weights_hash": result.weights_hash, "table": table_rows(config.results, config.experiment)}
