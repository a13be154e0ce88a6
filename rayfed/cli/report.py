"""`python -m rayfed.report RESULTS`: tables of a run or a sweep, also while it runs, and a plot of its curves."""

import argparse
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

import pandas as pd

from rayfed.cli.interrupts import command
from rayfed.core.errors import UsageError
from rayfed.core.records import POINTS, SPLITS
from rayfed.results.queries import comparison_text, target_text
from rayfed.results.read import read
from rayfed.results.report import plot, render
from rayfed.results.row_filter import filter_rows
from rayfed.results.selection import RULES
from rayfed.results.summary import summarise


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m rayfed.report", description=__doc__)
    parser.add_argument("folder", metavar="RESULTS", help="the folder that runs write to")
    parser.add_argument("--experiment", metavar="NAME", help="one experiment of the folder (default: all)")
    parser.add_argument("--metric", default="accuracy", help="accuracy, loss, ... (default: accuracy)")
    parser.add_argument("--point", choices=POINTS, help="model to show (default: the one that each paper evaluates)")
    parser.add_argument("--split", choices=SPLITS, help="default: the first of test, ood, val and train with values")
    parser.add_argument(
        "--rule", choices=RULES, help="rule for the round (default: selected; without validation final)"
    )
    parser.add_argument("--target", type=float, metavar="VALUE", help="report rounds and gigabytes to reach e.g. 0.8")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help='paired difference B - A; each is an algorithm, or "algorithm hyperparameters" as in the table',
    )
    parser.add_argument("--plot", metavar="FILE.png", help="write the curves over rounds")
    parser.add_argument("--csv", metavar="FILE", help="write means, standard deviations and seed counts of every rule")
    return parser


@command
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after printing one line on what is wrong with the request."""
    try:
        given = _parser().parse_args(arguments)
        shown = {"metric": given.metric, "point": given.point, "split": given.split}
        answers = [render(given.folder, given.experiment, rule=given.rule, **shown)]
        if given.plot or given.csv or given.compare or given.target is not None:
            tables = read(given.folder, given.experiment)
            width = shutil.get_terminal_size((100, 24)).columns
            if given.target is not None:
                answers.append(target_text(tables, given.target, width=width, **shown))
            if given.compare:
                names = (given.compare[0], given.compare[1])
                answers.append(comparison_text(tables, names, rule=given.rule, width=width, **shown))
            if given.plot:
                plot(tables, given.plot, **shown)
                answers.append(f"Plot: {given.plot}")
            if given.csv:
                _write_csv(filter_rows(summarise(tables).rows, tables, **shown), given.csv)
                answers.append(f"CSV: {given.csv}")
        print("\n\n".join(answers))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _write_csv(rows: pd.DataFrame, path: str) -> None:
    try:
        rows.drop(columns=["order", "higher_is_better"]).to_csv(path, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


if __name__ == "__main__":
    sys.exit(main())
