"""`rayfed report`: print the results of a run or a sweep as a table, plot its curves, compare algorithms."""

import argparse
import shutil

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.records import POINTS, SPLITS
from rayfed.results.queries import comparison_text, target_text
from rayfed.results.read import read
from rayfed.results.report import plot, render
from rayfed.results.row_filter import filter_rows
from rayfed.results.selection import RULES
from rayfed.results.summary import summarise


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the results of a run or a sweep as a table, also while it runs. By default, each trial is reported at "
        "the round with the best validation accuracy."
    )
    parser.add_argument("folder", metavar="RESULTS", help="folder of the results (the key `results` of the runs)")
    parser.add_argument("--experiment", metavar="NAME", help="one experiment of the folder (default: all of them)")
    parser.add_argument("--metric", default="accuracy", help="accuracy, loss, ... (default: accuracy)")
    parser.add_argument("--point", choices=POINTS, help="model scored (default: the one scored in the method's paper)")
    parser.add_argument("--split", choices=SPLITS, help="data scored (default: test; without test values, ood or val)")
    parser.add_argument("--rule", choices=RULES, help="choice of the round (default: selected; final if not validated)")
    parser.add_argument("--target", type=float, metavar="VALUE", help="report rounds and gigabytes to reach VALUE")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help='paired difference B minus A; each is an algorithm, or "algorithm hyperparameters" as in the table',
    )
    parser.add_argument("--plot", metavar="FILE.png", help="plot the curves over rounds")
    parser.add_argument("--csv", metavar="FILE", help="write means, standard deviations and seed counts, all rules")


def execute(options: argparse.Namespace) -> int:
    scored = {"metric": options.metric, "point": options.point, "split": options.split}
    answers = [render(options.folder, options.experiment, rule=options.rule, **scored)]
    if options.plot or options.csv or options.compare or options.target is not None:
        tables = read(options.folder, options.experiment)
        wide = {**scored, "width": shutil.get_terminal_size((100, 24)).columns}
        if options.target is not None:
            answers.append(target_text(tables, options.target, **wide))
        if options.compare:
            names = (options.compare[0], options.compare[1])
            answers.append(comparison_text(tables, names, rule=options.rule, **wide))
        if options.plot:
            plot(tables, options.plot, **scored)
            answers.append(f"Plot: {options.plot}")
        if options.csv:
            _write_csv(filter_rows(summarise(tables).rows, tables, **scored), options.csv)
            answers.append(f"CSV: {options.csv}")
    print("\n\n".join(answers))
    return 0


def _write_csv(rows: pd.DataFrame, path: str) -> None:
    try:
        rows.drop(columns=["order", "higher_is_better"]).to_csv(path, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error
