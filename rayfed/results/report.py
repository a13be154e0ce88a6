"""The report as text: tables of the results with their captions, and notes on what does not count."""

import shlex
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.records import POINTS, SERVER
from rayfed.results.common_rounds import scored_clients_notes
from rayfed.results.folder import join
from rayfed.results.metric_names import is_fraction
from rayfed.results.read import Tables, read
from rayfed.results.row_filter import filter_rows
from rayfed.results.storage import is_url
from rayfed.results.summary import selection_criterion, summarise
from rayfed.results.text_table import summary_table

RULE_CAPTIONS = {
    "final": "at the last evaluated round",
    "selected": "at the round with the best mean validation {criterion}",
    "oracle": "ORACLE: at the best round on this very split, which no honest protocol can know",
    "best5": "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle would",
}
_UNSEEN_CAPTIONS = {
    "downloaded": "with the downloaded model",
    "adapted": "after evaluate.adapt_epochs local epochs",
}
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
    """Return the report on `experiment`, or on every experiment in `folder`, as text.

    Args:
        metric: the metric to show.
        point: the model to show; None is the point at which each algorithm's paper evaluates.
        split: None is the first of test, ood, val and train with values there.
        rule: the rule that picks the round; None is `selected` if every trial has a value in the round that validation
            picks, and `final` otherwise.
        width: the width of the text in characters; None is the terminal's.

    Raises:
        UsageError: no results, or none of that metric, point, split or rule.
    """
    tables = read(folder, experiment)
    width = width or shutil.get_terminal_size((100, 24)).columns
    summary = summarise(tables)
    failures, location = _failures(tables.trials), _parquet_location(folder, tables)
    if summary.rows.empty:
        return "\n".join(["No trial is done yet.", *summary.notes, *failures, location])
    rows = filter_rows(summary.rows, tables, metric=metric, point=point, split=split)
    parts = []
    for name, of_experiment in rows.groupby("experiment"):
        shown, used_rule = _of_rule(of_experiment, rule)
        all_rows, used_split = summary.rows[summary.rows["experiment"] == name], str(shown["split"].iloc[0])
        criterion = selection_criterion(all_rows)
        caption = RULE_CAPTIONS[used_rule].format(criterion=criterion)
        title = f"{name}: {used_split} {metric}{_unit(metric)}, {caption}; mean ± sd over seeds"
        legend = f"{_columns_legend(tables, name, metric, used_split)}{_mark_legend(shown, criterion)} {_points(shown)}"
        table = summary_table(shown, metric, width=width)
        parts.extend([textwrap.fill(title, width), table, textwrap.fill(legend, width)])
        parts.extend(textwrap.fill(note, width) for note in _not_shown(all_rows, shown, f"{used_split} {metric}"))
        if used_rule != "final":
            parts.extend(textwrap.fill(note, width) for note in scored_clients_notes(tables.metrics, shown))
        parts.extend(_unseen_tables(all_rows, metric, used_split, width))
        if split is None:
            parts.extend(textwrap.fill(note, width) for note in _ood_hint(all_rows, metric, used_split, folder))
    notes = [textwrap.fill(note, width) for note in [*summary.notes, *failures]]
    return "\n\n".join([*parts, "\n".join([*notes, location])])


def plot(
    tables: Tables, path: str | Path, *, metric: str = "accuracy", point: str | None = None, split: str | None = None
) -> None:
    """Write the curves of one experiment's finished trials as a PNG; the arguments are those of `render`.

    Raises:
        UsageError: several experiments, nothing to plot, or a path that cannot be written to.
    """
    from rayfed.results.curves import draw_curves  # matplotlib takes most of a second to import

    if len(names := sorted(set(tables.trials["experiment"]))) > 1:
        raise UsageError(f"a plot shows one experiment; choose with --experiment: {', '.join(names)}")
    curves = summarise(tables).curves
    if curves.empty:
        raise UsageError(f"{path}: nothing to plot, because no trial is done yet")
    rows = filter_rows(curves, tables, metric=metric, point=point, split=split)
    draw_curves(rows, path, metric=metric, split=str(rows["split"].iloc[0]))


def _unit(metric: str) -> str:
    return ", %" if is_fraction(metric) else ""


def _unseen_tables(rows: pd.DataFrame, metric: str, split: str, width: int) -> Iterator[str]:
    """Yield titles and tables of the unseen clients, which are scored once, so that no rule applies."""
    is_shown = rows["unseen"] & (rows["metric"] == metric) & (rows["split"] == split) & (rows["rule"] == "final")
    for point, caption in _UNSEEN_CAPTIONS.items():
        if not (at_point := rows[is_shown & (rows["point"] == point)]).empty:
            experiment = at_point["experiment"].iloc[0]
            yield textwrap.fill(f"{experiment}: unseen clients, {caption}: {split} {metric}{_unit(metric)}", width)
            yield summary_table(at_point, metric, width=width)


def _of_rule(rows: pd.DataFrame, rule: str | None) -> tuple[pd.DataFrame, str]:
    """Return the rows of `rule`, or of the default rule, and the rule."""
    means = rows[rows["quantity"] == "mean"]
    groups = {name: set(zip(group["order"], group["seeds"], strict=True)) for name, group in means.groupby("rule")}
    if rule is None:
        rule = "selected" if groups.get("selected") == groups["final"] else "final"
    if rule not in groups:
        raise UsageError(
            f"rule={rule}: no validation split was evaluated at this point, or this metric was not measured in the "
            "round that the rule picks; use final"
        )
    return rows[rows["rule"] == rule], rule


def _ood_hint(rows: pd.DataFrame, metric: str, split: str, folder: str | Path) -> Iterator[str]:
    """Yield a hint at the scores on a domain that no client holds, if there are any and the table shows others."""
    ood = rows[(rows["split"] == "ood") & (rows["metric"] == metric)]
    if split != "ood" and not ood.empty:
        arguments = shlex.join([str(folder), "--experiment", str(rows["experiment"].iloc[0])])
        yield f"Also scored on a domain that no client holds: rayfed report {arguments} --split ood"


def _not_shown(rows: pd.DataFrame, shown: pd.DataFrame, what: str) -> list[str]:
    """Return a note on the algorithms that have finished trials and are not in the table."""
    names = sorted(set(rows["algorithm"]) - set(shown["algorithm"]))
    return [f"Not shown, because they have no {what} at the model scored: {', '.join(names)}."] if names else []


def _columns_legend(tables: Tables, experiment: str, metric: str, split: str) -> str:
    """Explain what the mean is over: clients, or the server's values where no client has one."""
    rows = tables.metrics
    shown = rows[(rows["experiment"] == experiment) & (rows["metric"] == metric) & (rows["split"] == split)]
    if (shown["client"] == SERVER).all():
        return "AVG: mean over the server's values, one for each domain if it has several. worst: the worst of them."
    return "AVG: mean over clients. worst: the worst client."


def _points(rows: pd.DataFrame) -> str:
    algorithms = rows.groupby("point")["algorithm"].unique()
    if len(algorithms) == 1:
        return f"Model scored: {algorithms.index[0]}."
    words = [f"{point} of {', '.join(sorted(algorithms[point]))}" for point in POINTS if point in algorithms]
    return f"Model scored: {'; '.join(words)}."


def _mark_legend(rows: pd.DataFrame, criterion: str) -> str:
    counts = rows.groupby("algorithm")["order"].nunique()
    tuned = rows[rows["algorithm"].map(counts) > 1]
    if tuned.empty:
        return ""
    if tuned["chosen"].any():
        return f" *: the algorithm's hyperparameters with the best mean validation {criterion}."
    return " No hyperparameters are marked as chosen, because no validation split was evaluated."


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


def _parquet_location(folder: str | Path, tables: Tables) -> str:
    names = sorted(set(tables.trials["experiment"]) | set(tables.metrics["experiment"]))
    home = join(str(folder) if is_url(folder) else Path(folder).as_posix(), names[0] if names else "EXPERIMENT")
    path = f"{home}/metrics"
    return f"Parquet: pandas.read_parquet({path!r}), and likewise rounds and trials"  # repr: a name may hold a quote
