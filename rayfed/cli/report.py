"""`rayfed report`: print the results of a run or a sweep as a table, plot its curves, compare algorithms."""

import argparse
import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.results.common_rounds import clients_differ
from rayfed.results.metric_names import is_share
from rayfed.results.queries import comparison_text, target_text
from rayfed.results.read import Tables, read
from rayfed.results.row_filter import wanted
from rayfed.results.selection import RULES
from rayfed.results.summary import criterion, summarise
from rayfed.results.tables import POINTS, SERVER, SPLITS
from rayfed.results.text_table import setting_table

RULE_WORDS = {
    "final": "at the last evaluated round",
    "selected": "at the round with the best mean validation {criterion}",
    "oracle": "ORACLE: at the round that is best on this very split, which no honest protocol can know",
    "best5": "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle would",
}
_NEWCOMERS = {"downloaded": "as they download the model", "adapted": "after evaluate.adapt_epochs epochs of their own"}
_FAILURES_SHOWN = 5


def render(
    folder: str | Path,
    experiment: str | None = None,
    *,
    metric: str = "accuracy",
    point: str | None = None,
    split: str | None = None,
    rule: str | None = None,
    width: int | None = None,
) -> str:
    """The report on `experiment`, or on every one in `folder`, as text of `width` columns (None: the terminal's).

    `point` None is the point that each algorithm's paper scores. `split` None is the first of test, ood, val and train
    with values there. `rule` None is `selected` where every trial has a value in the round that validation picks, and
    `final` where not.

    Raises:
        UsageError: no results, or none of that metric, point, split or rule.
    """
    tables = read(folder, experiment)
    width = width or shutil.get_terminal_size((100, 24)).columns
    summary = summarise(tables)
    if summary.rows.empty:
        return "\n".join(["No trial is done yet.", *summary.notes, *_failures(tables.trials), *_where(folder, tables)])
    rows = wanted(summary.rows, tables, metric=metric, point=point, split=split)
    parts = []
    for name, of_experiment in rows.groupby("experiment"):
        shown, used = _ruled(of_experiment, rule)
        there, of = str(shown["split"].iloc[0]), summary.rows[summary.rows["experiment"] == name]
        unit, judge = ", %" if is_share(metric) else "", criterion(of)
        title = f"{name}: {there} {metric}{unit}, {RULE_WORDS[used].format(criterion=judge)}; mean ± sd over seeds"
        caption = f"{_counted(tables, name, metric, there)}{_choice(shown, judge)} {_scored(shown)}"
        table = setting_table(shown, metric, width=width)
        parts.extend([textwrap.fill(title, width), table, textwrap.fill(caption, width)])
        parts.extend(textwrap.fill(note, width) for note in _missing(of, shown, f"{there} {metric}"))
        if used != "final":
            parts.extend(textwrap.fill(note, width) for note in clients_differ(tables.metrics, shown))
        parts.extend(_unseen(of, metric, there, width))
        if split is None:
            parts.extend(textwrap.fill(note, width) for note in _also(of, metric, there, folder))
    notes = [textwrap.fill(note, width) for note in [*summary.notes, *_failures(tables.trials)]]
    return "\n\n".join([*parts, "\n".join([*notes, *_where(folder, tables)])])


def plot(
    tables: Tables, path: str | Path, *, metric: str = "accuracy", point: str | None = None, split: str | None = None
) -> None:
    """Writes the curves of one experiment's trials that are done as a PNG; arguments and errors are as of `render`."""
    from rayfed.results.curves import draw  # matplotlib takes most of a second to import

    if len(names := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"a plot shows one experiment; choose with --experiment: {', '.join(names)}")
    curves = summarise(tables).curves
    if curves.empty:
        raise UsageError(f"{path}: nothing to plot, because no trial is done yet")
    rows = wanted(curves, tables, metric=metric, point=point, split=split)
    draw(rows, path, metric=metric, split=str(rows["split"].iloc[0]))


def _unseen(rows: pd.DataFrame, metric: str, split: str, width: int) -> Iterator[str]:
    """Tables of the clients that took no part in training; they are scored once, so that no rule has a say."""
    late = rows[rows["unseen"] & (rows["metric"] == metric) & (rows["split"] == split) & (rows["rule"] == "final")]
    for point, words in _NEWCOMERS.items():
        if point in set(late["point"]):
            unit = ", %" if is_share(metric) else ""
            yield textwrap.fill(f"{rows['experiment'].iloc[0]}: unseen clients, {words}: {split} {metric}{unit}", width)
            yield setting_table(late[late["point"] == point], metric, width=width)


def _ruled(rows: pd.DataFrame, rule: str | None) -> tuple[pd.DataFrame, str]:
    """The lines of the rule, and which it was."""
    means = rows[rows["quantity"] == "mean"]
    of_rule = {name: set(zip(group["order"], group["seeds"], strict=True)) for name, group in means.groupby("rule")}
    if rule is None:
        rule = "selected" if of_rule.get("selected") == of_rule["final"] else "final"
    if rule not in of_rule:
        raise UsageError(
            f"rule={rule}: no validation split was evaluated at this point, or this metric not in the round that it "
            "picks; use final"
        )
    return rows[rows["rule"] == rule], rule


def _also(rows: pd.DataFrame, metric: str, split: str, folder: str | Path) -> Iterator[str]:
    """A line on the domain that nobody holds, where its values are there and the table shows others."""
    held = rows[(rows["split"] == "ood") & (rows["metric"] == metric)]
    if split != "ood" and not held.empty:
        name = shlex.join([str(folder), "--experiment", str(rows["experiment"].iloc[0])])
        yield f"Scored, too, on a domain that nobody holds: rayfed report {name} --split ood"


def _missing(rows: pd.DataFrame, shown: pd.DataFrame, what: str) -> list[str]:
    """A line on the algorithms that are done and not in the table."""
    names = sorted(set(rows["algorithm"]) - set(shown["algorithm"]))
    return [f"Not shown, because they have no {what} at the model scored: {', '.join(names)}."] if names else []


def _counted(tables: Tables, experiment: str, metric: str, split: str) -> str:
    """What the mean is over: clients, or what the server has where no client has a value."""
    rows = tables.metrics
    asked = rows[(rows["experiment"] == experiment) & (rows["metric"] == metric) & (rows["split"] == split)]
    if (asked["client"] == SERVER).all():
        return "AVG: mean over the server's values, one a domain where it has several. worst: the worst of them."
    return "AVG: mean over clients. worst: the worst client."


def _scored(rows: pd.DataFrame) -> str:
    algorithms = rows.groupby("point")["algorithm"].unique()
    if len(algorithms) == 1:
        return f"Model scored: {algorithms.index[0]}."
    words = [f"{point} of {', '.join(sorted(algorithms[point]))}" for point in POINTS if point in algorithms]
    return f"Model scored: {'; '.join(words)}."


def _choice(rows: pd.DataFrame, judge: str) -> str:
    settings = rows.groupby("algorithm")["order"].nunique()
    several = rows[rows["algorithm"].map(settings) > 1]
    if several.empty:
        return ""
    if several["chosen"].any():
        return f" *: the algorithm's setting with the best mean validation {judge}."
    return " No setting is marked as chosen, because no validation split was evaluated."


def _failures(trials: pd.DataFrame) -> list[str]:
    failed = trials[trials["status"].isin(["failed", "diverged"])]
    if failed.empty:
        return []
    words = [
        f"{trial} {status} ({error if isinstance(error, str) else 'no error recorded'})"
        for trial, status, error in zip(failed["trial"], failed["status"], failed["error"], strict=True)
    ]
    more = f"; and {len(words) - _FAILURES_SHOWN} more" if len(words) > _FAILURES_SHOWN else ""
    return [f"Not finished: {'; '.join(words[:_FAILURES_SHOWN])}{more}."]


def _where(folder: str | Path, tables: Tables) -> list[str]:
    names = sorted(set(tables.trials["experiment"]) | set(tables.metrics["experiment"]))
    home = Path(folder) / (names[0] if names else "EXPERIMENT")
    path = f"{home.as_posix()}/metrics"
    return [f"Parquet: pandas.read_parquet({path!r}), and likewise rounds and trials"]  # a name may hold a quote


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
        help='paired difference B minus A; each is an algorithm, or "algorithm setting" as in the table',
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
            answers.append(comparison_text(tables, names, rule=options.rule, rule_words=RULE_WORDS, **wide))
        if options.plot:
            plot(tables, options.plot, **scored)
            answers.append(f"Plot: {options.plot}")
        if options.csv:
            _write_csv(wanted(summarise(tables).rows, tables, **scored), options.csv)
            answers.append(f"CSV: {options.csv}")
    print("\n\n".join(answers))
    return 0


def _write_csv(rows: pd.DataFrame, path: str) -> None:
    try:
        rows.drop(columns="order").to_csv(path, index=False)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error
