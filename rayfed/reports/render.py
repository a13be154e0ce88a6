"""The report in several formats: tables of the results with captions, and notes on what does not count."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.paths import absolute, lasting
from rayfed.core.records import POINTS
from rayfed.records.storage import is_url, join
from rayfed.reports.read import Tables, read, read_events
from rayfed.reports.selection import TRIAL, selected_rounds
from rayfed.reports.summary import (
    DEFAULT_VIEW,
    RULE_CAPTIONS,
    Summary,
    View,
    at_default_points,
    filter_rows,
    is_of_server,
    mean_caption,
    out_of_domain_points,
    rows_of_rule,
    score_notes,
    summarise,
    unit,
)
from rayfed.reports.tables import (
    CHOSEN,
    LATEX_PACKAGES,
    ResultTable,
    Stars,
    latex_table,
    make_table,
    markdown_table,
    text_table,
)

FORMATS = ("text", "markdown", "latex", "csv")
OOD = "ood"
_UNSEEN_CAPTIONS = {"downloaded": "with the downloaded model", "adapted": "after evaluate.adapt_epochs local epochs"}
_FAILURES_SHOWN = 5


@dataclass(frozen=True)
class Section:
    """One table of the report.

    Attributes:
        title: A sentence that says what the numbers are.
        legend: The meaning of columns and marks.
        label: A text for LaTeX's references that no other table of the report has.
        notes: Further sentences for the reader.
    """

    experiment: str
    split: str
    title: str
    table: ResultTable
    legend: str
    label: str
    notes: tuple[str, ...] = ()


def render(
    folder: str | Path,
    experiment: str | None = None,
    view: View = DEFAULT_VIEW,
    *,
    width: int | None = None,
    format: str = "text",
    stars: Mapping[str, Stars] | None = None,
    tables: Tables | None = None,
) -> str:
    """Return the report on `experiment`, or on every experiment in `folder`.

    Args:
        view: What to show. Without a split, the tables on the split ood follow.
        width: The width of the text in characters; None: that of the terminal.
        format: One of `FORMATS`; csv has the values under every rule.
        stars: The stars of significance by experiment.
        tables: What `read(folder, experiment, select=view.select)` returned, if the caller has it.

    Raises:
        UsageError: There are no results, or none of that metric, point, split or rule.
    """
    tables = read(folder, experiment, select=view.select) if tables is None else tables
    width = width or shutil.get_terminal_size((100, 24)).columns
    summary = summarise(tables)
    failures, location = failure_notes(tables.trials), _parquet_location(folder, tables)
    if summary.rows.empty:
        return "\n".join(["No trial is done yet.", *summary.notes, *failures, location])
    if view.metric is None and set(summary.rows["metric"]).isdisjoint(tables.criteria.values()):
        raise UsageError(
            "no model was scored; clients need test or validation data (partition.test, partition.validation), which "
            "evaluate.splits names"
        )
    if format == "csv":
        rows = reported_rows(summary, tables, view).drop(columns=["order", "higher_is_better", "chosen_by_default"])
        return str(rows.to_csv(index=False)).rstrip("\n")
    shown = sections(tables, summary, view, stars)
    notes = [*_absent_experiments(summary, shown, view), *summary.notes, *restart_notes(folder, experiment), *failures]
    if format == "latex":
        parts = [LATEX_PACKAGES]
        for section in shown:
            code = latex_table(section.table, f"{section.title}.", section.label)
            parts.append("\n".join([*(f"% {line}" for line in (section.legend, *section.notes) if line), code]))
        return "\n\n".join([*parts, *(f"% {note}" for note in notes)])
    if format == "markdown":
        parts = []
        for section in shown:
            title, legend = (text.replace("*", "\\*") for text in (section.title, section.legend))
            parts += filter(None, [title, markdown_table(section.table), legend, *section.notes])
        return "\n\n".join([*parts, *notes])
    parts = []
    for section in shown:
        words = [textwrap.fill(text, width) for text in (section.legend, *section.notes) if text]
        parts += [textwrap.fill(section.title, width), text_table(section.table, width=width), *words]
    return "\n\n".join([*parts, "\n".join([*(textwrap.fill(note, width) for note in notes), location])])


def sections(tables: Tables, summary: Summary, view: View, stars: Mapping[str, Stars] | None = None) -> list[Section]:
    """Return the tables of the report; see `render` for the arguments and errors."""
    rows = filter_rows(summary.rows, tables, view)
    parts = []
    for name, of_experiment in rows.groupby("experiment"):
        shown = str(of_experiment["metric"].iloc[0])
        experiment = _Experiment(str(name), tables, summary, shown)
        main = experiment.section(of_experiment, view.rule, (stars or {}).get(str(name)))
        parts.append(main)
        parts += experiment.unseen(main.split)
        if view.split is None and main.split != OOD:
            parts += experiment.out_of_domain(view.rule)
    return parts


def reported_rows(summary: Summary, tables: Tables, view: View) -> pd.DataFrame:
    """Return the rows of the summary that `sections` shows, under all rules and with all quantities."""
    rows = filter_rows(summary.rows, tables, view)
    shown = rows[["experiment", "split", "metric"]].drop_duplicates()
    of_metric = summary.rows.merge(shown[["experiment", "metric"]].drop_duplicates())
    parts = [rows, _unseen_rows(of_metric).merge(shown)]
    if view.split is None:
        ood = _ood_rows(of_metric)
        has_table = set(rows.loc[rows["split"] == OOD, "experiment"])
        parts.append(ood[ood["experiment"].isin(set(rows["experiment"]) - has_table)])
    return pd.concat(parts, ignore_index=True)


class _Experiment:
    """Maker of the sections of one experiment."""

    def __init__(self, name: str, tables: Tables, summary: Summary, metric: str):
        self.name, self.metric, self._tables = name, metric, tables
        self._rows = summary.rows[summary.rows["experiment"] == name]
        self._shown = self._rows[self._rows["metric"] == metric]
        self._criterion = tables.criteria[name]
        done = tables.done[tables.done["experiment"] == name]
        self._done = done[[*TRIAL, "order", "seed", "leave_out"]].merge(
            tables.trials[[*TRIAL, "partition_hash", "clients_scored"]], on=TRIAL
        )

    def section(self, rows: pd.DataFrame, rule: str | None, stars: Stars | None = None) -> Section:
        """Return the section of `rows` of one split, for the participants."""
        shown, rule = rows_of_rule(rows, rule)
        split = str(shown["split"].iloc[0])
        table = make_table(shown, self.metric, stars)
        what = f"out-of-domain {self.metric} (split ood)" if split == OOD else f"{split} {self.metric}"
        caption = RULE_CAPTIONS[rule].format(criterion=self._criterion)
        notes = _not_shown(self._rows, rows, shown, f"{split} {self.metric}") if split != OOD else []
        notes += score_notes(self._tables.counts, shown, rule)
        return Section(
            experiment=self.name,
            split=split,
            title=f"{self.name}: {what}{unit(self.metric)}, {caption}; {self._mean_caption(table)}",
            table=table,
            legend=" ".join(
                filter(None, [*self._legend(table, shown, split, rule), _stars_legend(stars), *table.remarks])
            ),
            label=f"{self.name}: {what}",
            notes=tuple(notes),
        )

    def unseen(self, split: str) -> Iterator[Section]:
        """Yield the sections of unseen clients. They are scored once, so no rule picks a round."""
        rows = _unseen_rows(self._shown)
        rows = rows[rows["split"] == split]
        for point, caption in _UNSEEN_CAPTIONS.items():
            if not (at_point := rows[rows["point"] == point]).empty:
                table = make_table(at_point, self.metric)
                what = f"unseen clients, {caption}: {split} {self.metric}{unit(self.metric)}"
                title = f"{self.name}: {what}; {self._mean_caption(table)}"
                words = [_mark_legend(at_point, self._criterion), *table.remarks]
                label = f"{self.name}: unseen clients {point} {split} {self.metric}"
                yield Section(self.name, split, title, table, " ".join(filter(None, words)), label)

    def out_of_domain(self, rule: str | None) -> Iterator[Section]:
        """Yield the section of domains that no client holds, if there are any."""
        rows = _ood_rows(self._shown)
        if not rows.empty:
            with_rule = rows["rule"].eq(rule).any()
            yield self.section(rows, rule if with_rule else None)

    def _mean_caption(self, table: ResultTable) -> str:
        return mean_caption(self._done[self._done["order"].isin(table.orders)])

    def _legend(self, table: ResultTable, shown: pd.DataFrame, split: str, rule: str) -> Iterator[str]:
        headers = {column.header for column in table.columns}
        counts = self._tables.counts
        of_server = is_of_server(counts[counts["experiment"] == self.name], split, self.metric)
        if "AVG" in headers:
            of_domains = "the server's values, one for each domain if it has several"
            yield f"AVG: mean over {of_domains if of_server else 'clients'}."
        else:
            yield "Values are the server's." if of_server else "Means are over clients."
        if "worst 10 %" in headers:
            yield f"best (worst) 10 %: mean over the best (worst) tenth of {'them' if of_server else 'the clients'}."
        if "worst" in headers:
            yield "worst: the worst of them." if of_server else "worst: the worst client."
        yield _mark_legend(shown, self._criterion)
        yield _points(shown)
        if rule == "selected":
            means = self._tables.curves[self._tables.curves["quantity"] == "mean"]
            rounds = selected_rounds(means, self._tables.criteria).merge(self._done[[*TRIAL, "order"]], on=TRIAL)
            rounds = rounds.merge(shown[["order", "algorithm", "unseen", "point"]].drop_duplicates())
            spans = rounds.groupby("algorithm")["round"].agg(["min", "max"]).itertuples()
            chosen = [f"{name} {low}{f' to {high}' * (high > low)}" for name, low, high in spans]
            yield f"Rounds chosen: {', '.join(chosen)}."


def _unseen_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of unseen clients, with `chosen_by_default` as `chosen`."""
    rows = rows[rows["unseen"] & (rows["rule"] == "final")]
    return rows.assign(chosen=rows["chosen_by_default"])


def _ood_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of domains that no client holds, with `chosen_by_default` as `chosen`."""
    rows = rows[~rows["unseen"] & (rows["split"] == OOD)]
    rows = at_default_points(rows, out_of_domain_points(rows))
    return rows.assign(chosen=rows["chosen_by_default"])


def failure_notes(trials: pd.DataFrame) -> list[str]:
    """Return a note on the trials that failed or diverged, with their errors."""
    failed = trials[trials["status"].isin(["failed", "diverged"])]
    if failed.empty:
        return []
    words, failed = [], failed.fillna({"error": "no error recorded"})
    for (status, error), group in failed.groupby(["status", "error"], sort=False):
        others = f" and {len(group) - 1} more" if len(group) > 1 else ""
        words.append(f"{group['trial'].iloc[0]}{others} {status} ({error})")
    more = f"; and {len(words) - _FAILURES_SHOWN} other errors" if len(words) > _FAILURES_SHOWN else ""
    return [f"Not finished: {'; '.join(words[:_FAILURES_SHOWN])}{more}."]


def restart_notes(folder: str | Path, experiment: str | None) -> list[str]:
    """Return a note on the trials that went back to a checkpoint because a process was lost, and how often."""
    events = read_events(folder, experiment)
    counts = events.loc[events["event"] == "trial restarted", "trial"].value_counts()
    words = [f"{trial} {count} time{'s' * (count > 1)}" for trial, count in counts.head(_FAILURES_SHOWN).items()]
    more = f"; and {len(counts) - len(words)} other trials" if len(counts) > len(words) else ""
    return [f"Restarted: {'; '.join(words)}{more}."] if words else []


def _absent_experiments(summary: Summary, shown: Iterable[Section], view: View) -> list[str]:
    """Return a note on the experiments that have finished trials and no table."""
    names = sorted(set(summary.rows["experiment"]) - {section.experiment for section in shown})
    if not names:
        return []
    what = " ".join(filter(None, [view.split, view.metric or "values of their metric"]))
    return [f"Experiments not shown, because they have no {what} at the model scored: {', '.join(names)}."]


def _not_shown(rows: pd.DataFrame, scored: pd.DataFrame, shown: pd.DataFrame, what: str) -> list[str]:
    """Return notes on the methods that have finished trials and are not in the table.

    `rows` has the rows of all methods, `scored` those of the split and the model scored under any rule, and `shown`
    those of the table. `what` names the split and the metric.
    """
    notes = []
    for why, have, lack in (("at the model scored", rows, scored), ("in the round that the rule picks", scored, shown)):
        missing = have[~have["order"].isin(lack["order"])]
        whole = ~missing["algorithm"].isin(lack["algorithm"])  # no hyperparameters of the algorithm are shown
        labels = missing["algorithm"].where(
            whole | missing["hyperparameters"].eq(""), missing["algorithm"] + " " + missing["hyperparameters"]
        )
        if names := sorted(set(labels)):
            notes.append(f"Not shown, because they have no {what} {why}: {'; '.join(names)}.")
    return notes


def _points(rows: pd.DataFrame) -> str:
    several = rows.groupby("algorithm")["point"].transform("nunique") > 1  # labels then need the hyperparameters
    labels = rows["algorithm"].where(~several, rows["algorithm"] + " (" + rows["hyperparameters"] + ")")
    methods = labels.groupby(rows["point"]).unique()
    if len(methods) == 1:
        return f"Model scored: {methods.index[0]}."
    words = [f"{point} of {', '.join(sorted(methods[point]))}" for point in POINTS if point in methods]
    return f"Model scored: {'; '.join(words)}."


def _mark_legend(rows: pd.DataFrame, criterion: str) -> str:
    counts = rows.groupby("algorithm")["order"].nunique()
    tuned = rows[rows["algorithm"].map(counts) > 1]
    if tuned.empty:
        return ""
    if tuned["chosen"].any():
        return f"{CHOSEN}: the algorithm's hyperparameters with the best mean validation {criterion}."
    return f"No hyperparameters are marked as chosen, because the model scored has no validation {criterion}."


def _stars_legend(stars: Stars | None) -> str:
    if stars is None or not any(stars.marks.values()):
        return ""
    levels = "p below 0.05, 0.01, 0.001 (paired t, Holm-corrected for all pairs)"
    return f"*, **, ***: differs from {stars.best} with {levels}."


def _parquet_location(folder: str | Path, tables: Tables) -> str:
    names = sorted(set(tables.trials["experiment"]) | set(tables.counts["experiment"]))
    folder = str(folder) if is_url(folder) else absolute(lasting(folder)).as_posix()
    path = f"{join(folder, names[0] if names else 'EXPERIMENT')}/metrics"
    return f"Parquet: pandas.read_parquet({path!r}), and likewise rounds and trials"  # repr: a name may hold a quote
