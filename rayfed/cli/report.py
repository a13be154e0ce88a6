"""`rayfed report`: tables of the results of a run or a sweep, plots, comparisons, and a page in HTML."""

import argparse
import shutil
import sys
import textwrap
from collections.abc import Sequence

from rayfed.cli.json_output import Document, add_json, trial_rows, write_json
from rayfed.core.errors import UsageError
from rayfed.core.records import POINTS, SPLITS
from rayfed.reports.charts import KINDS, plot
from rayfed.reports.comparison import Pairs, compare
from rayfed.reports.pairs import pairs_table, stars_against_best
from rayfed.reports.read import Tables, of_experiment, read
from rayfed.reports.render import FORMATS, render, reported_values
from rayfed.reports.selection import RULES
from rayfed.reports.summary import View
from rayfed.reports.target import target_text


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the results of a run or a sweep as a table, also while it runs. By default, each trial is reported at "
        "the round with the best validation score, by the metric that select.metric of the runs names."
    )
    add_json(parser)
    parser.add_argument("folder", metavar="RESULTS", help="folder of the results (the key `results` of the runs)")
    parser.add_argument("--experiment", metavar="NAME", help="one experiment of the folder (default: all of them)")
    parser.add_argument("--metric", help="metric to show, at the same rounds (default: the one that chooses)")
    parser.add_argument(
        "--select", metavar="METRIC", help="metric that chooses rounds and hyperparameters (default: select.metric)"
    )
    parser.add_argument("--point", choices=POINTS, help="model scored (default: the one scored in the method's paper)")
    parser.add_argument("--split", choices=SPLITS, help="data scored (default: test, else ood or val; and ood besides)")
    parser.add_argument("--rule", choices=RULES, help="choice of the round (default: selected; final if not validated)")
    parser.add_argument(
        "--format", choices=FORMATS, default="text", help="format of the tables (default: text, for a terminal)"
    )
    parser.add_argument(
        "--target", type=float, metavar="VALUE", help="report rounds, gigabytes and simulated time to reach VALUE"
    )
    parser.add_argument(
        "--compare",
        nargs="*",
        metavar=("A", "B"),
        help="compare all methods in pairs with tests of significance, or with two names only B minus A; a name is an "
        'algorithm, or "algorithm hyperparameters" as in the table',
    )
    parser.add_argument("--plot", metavar="FILE", help="write a plot as FILE.png, FILE.pdf or FILE.svg")
    kinds = "; ".join(f"{name}: {kind.shows}" for name, kind in KINDS.items())
    parser.add_argument("--kind", choices=KINDS, help=f"kind of plot: {kinds} (default: curves)")
    parser.add_argument("--x", dest="kind", choices=("bytes", "clock", "epsilon"), help="axis of curves, as --kind")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with tables, plots and failures")


def execute(options: argparse.Namespace) -> int:
    if options.compare is not None and len(options.compare) not in (0, 2):
        given = f"{len(options.compare)}: {' '.join(options.compare)}"
        raise UsageError(f"--compare: expected no name or two, got {given}")
    if options.kind is not None and options.plot is None:
        raise UsageError(f"--kind {options.kind}: describes a plot; give --plot FILE as well")
    width = shutil.get_terminal_size((100, 24)).columns
    if options.json:
        return write_json("report", lambda: _document(options))
    view = View(options.metric, options.point, options.split, options.rule, options.select)
    tables = read(options.folder, options.experiment, select=view.select)
    pairs: list[Pairs] = []
    unpaired: list[str] = []
    if options.compare is not None:
        pairs, unpaired = _pairs(tables, view, options.compare)
    stars = {}
    for one in pairs:
        stars[one.experiment] = stars_against_best(one)
    answers = [
        render(options.folder, options.experiment, view, width=width, format=options.format, stars=stars, tables=tables)
    ]
    answers += [pairs_table(one, width=width, format=options.format) for one in pairs]
    if options.format == "csv":  # which has no notes
        for _, fault in tables.faults:
            print(f"rayfed: left out: {fault}", file=sys.stderr)
    elif options.format == "latex":
        answers += [f"% {note}" for note in unpaired]
    else:
        answers += [textwrap.fill(note, width) for note in unpaired]
    if options.target is not None:
        answers.append(target_text(tables, options.target, view, width=width))
    answers += _files(options, tables, view)
    print("\n\n".join(answers))
    return 0


def _document(options: argparse.Namespace) -> Document:
    view = View(options.metric, options.point, options.split, options.rule, options.select)
    values = reported_values(options.folder, options.experiment, view).to_dict("records")
    trials = trial_rows(options.folder, options.experiment)
    return 0, {"results": options.folder, "trials": trials, "table": values}


def _pairs(tables: Tables, view: View, names: Sequence[str]) -> tuple[list[Pairs], list[str]]:
    """Return the comparison of all pairs for each experiment, and why others have none.

    With the names of two methods, of one experiment, these alone are compared.

    Raises:
        UsageError: no experiment has pairs.
    """
    if names:
        return [compare(tables, view, names)], []
    pairs = []
    errors = {}
    for name in sorted(set(tables.trials["experiment"])):
        try:
            pairs.append(compare(of_experiment(tables, name), view))
        except UsageError as error:
            errors[name] = error
    if errors and not pairs:
        raise next(iter(errors.values()))
    unpaired = []
    for name, refusal in errors.items():
        reason = str(refusal).removeprefix("compare: ")
        unpaired.append(f"{name}: no pairs; {reason}.")
    return pairs, unpaired


def _files(options: argparse.Namespace, tables: Tables, view: View) -> list[str]:
    """Write the files that are asked for, and return a line for each."""
    written = []
    if options.plot:
        plot(options.folder, tables, options.plot, options.kind or "curves", view)
        written.append(f"Plot: {options.plot}")
    if options.html:
        from rayfed.reports.page import write_page

        write_page(options.folder, options.experiment, options.html, view)
        written.append(f"Page: {options.html}")
    return written
