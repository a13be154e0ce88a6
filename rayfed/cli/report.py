"""`rayfed report`: tables of the results of a run or a sweep, plots, comparisons, and a page in HTML."""

import argparse
import shutil
import sys
import textwrap

from rayfed.cli.json_output import Document, add_json, trial_rows, write_json
from rayfed.core.errors import UsageError
from rayfed.core.round_record import POINTS, SPLITS
from rayfed.reports.charts import KINDS, plot
from rayfed.reports.comparison import SITES, Pairs, compare
from rayfed.reports.pairs import pairs_table, stars_against
from rayfed.reports.read import Tables, of_experiment, read, read_by_data
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
        "--chosen", action="store_true", help="show each method only with the hyperparameters that validation chose"
    )
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
    parser.add_argument("--baseline", metavar="A", help="compare all methods with A, in place of all pairs")
    parser.add_argument("--by", choices=SITES, help="compare at each domain or client, and not only means over clients")
    parser.add_argument("--plot", metavar="FILE", help="write a plot as FILE.png, FILE.pdf or FILE.svg")
    kinds = "; ".join(f"{name}: {kind.shows}" for name, kind in KINDS.items())
    parser.add_argument("--kind", choices=KINDS, metavar="KIND", help=f"kind of plot: {kinds} (default: curves)")
    parser.add_argument("--x", dest="kind", choices=("bytes", "clock", "epsilon"), help="axis of curves, as --kind")
    parser.add_argument("--html", metavar="FILE", help="write one self-contained page with tables, plots and failures")


def execute(options: argparse.Namespace) -> int:
    _check(options)
    width = shutil.get_terminal_size((100, 24)).columns
    if options.json:
        return write_json("report", lambda: _document(options))
    view = View(options.metric, options.point, options.split, options.rule, options.select, options.chosen)
    tables = read_by_data(options.folder, options.experiment, select=view.select)
    pairs, unpaired = _pairs(options, tables, view)
    stars = {one.experiment: stars_against(one) for one in pairs}
    answers = [
        render(options.folder, options.experiment, view, width=width, format=options.format, stars=stars, tables=tables)
    ]
    for one in pairs:
        answers.append(pairs_table(one, width=width, format=options.format))
    if options.format == "csv":  # which has no notes
        for _, fault in tables.faults:
            print(f"rayfed: left out: {fault}", file=sys.stderr)
    else:
        for note in unpaired:
            answers.append(_as_comment(note, options.format, width))
    if options.target is not None:
        answers.append(target_text(tables, options.target, view, width=width))
    answers += _files(options, tables, view)
    print("\n\n".join(answers))
    return 0


def _document(options: argparse.Namespace) -> Document:
    view = View(options.metric, options.point, options.split, options.rule, options.select, options.chosen)
    values = reported_values(options.folder, options.experiment, view).to_dict("records")
    trials = trial_rows(options.folder, options.experiment)
    return 0, {"results": options.folder, "trials": trials, "table": values}


def _check(options: argparse.Namespace) -> None:
    """Raise UsageError for options that do not go together."""
    if options.compare is not None and len(options.compare) not in (0, 2):
        raise UsageError(f"--compare: expected no name or two, got {len(options.compare)}: {' '.join(options.compare)}")
    if options.compare and options.baseline is not None:
        raise UsageError(f"--baseline {options.baseline}: compares all with it, and --compare two alone; give one")
    if options.kind is not None and options.plot is None:
        raise UsageError(f"--kind {options.kind}: describes a plot; give --plot FILE as well")


def _pairs(options: argparse.Namespace, tables: Tables, view: View) -> tuple[list[Pairs], list[str]]:
    """Return the comparison that is asked for, of each experiment, and why others have none.

    Raises:
        UsageError: No experiment has pairs.
    """
    names = options.compare or ()
    if options.compare is None and options.baseline is None and options.by is None:
        return [], []
    if names and len(tables.places) > 1 and not _differ_in_data(tables):
        return [compare(tables, view, names)], []  # raises
    pairs = []
    errors = []
    unpaired = []
    for name in sorted(set(tables.trials["experiment"])):
        try:
            pairs.append(compare(of_experiment(tables, name), view, names, baseline=options.baseline, by=options.by))
        except UsageError as error:
            errors.append(error)
            unpaired.append(f"{name}: no pairs; {str(error).removeprefix('compare: ')}.")
    if pairs:
        return pairs, unpaired
    if names and len(errors) > 1:  # names of methods with other data; what differs is told by the whole experiment
        compare(read(options.folder, options.experiment), view, names)
    raise errors[0]


def _differ_in_data(tables: Tables) -> bool:
    """Return whether several experiments of the tables are one experiment with different data."""
    folders = {home.location for home in tables.places.values()}
    return len(tables.places) > 1 and len(folders) == 1


def _as_comment(note: str, format: str, width: int) -> str:
    """Return a note as it stands below a table."""
    if format == "latex":
        return f"% {note}"
    return textwrap.fill(note, width)


def _files(options: argparse.Namespace, tables: Tables, view: View) -> list[str]:
    """Write the files that are asked for, and return a line for each."""
    written = []
    if options.plot:
        kind = options.kind or "curves"
        if kind == "sensitivity" and _differ_in_data(tables):  # which is drawn, too
            tables = read(options.folder, options.experiment, select=view.select)
        plot(tables, options.plot, kind, view)
        written.append(f"Plot: {options.plot}")
    if options.html:
        from rayfed.reports.page import write_page

        write_page(options.folder, options.experiment, options.html, view, options.baseline)
        written.append(f"Page: {options.html}")
    return written
