"""The tables of a report with their titles, legends and notes: one for each split and kind of clients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pandas as pd

from rayfed.core.records import POINTS
from rayfed.records.published import Published
from rayfed.reports.published import published_note, with_published
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, selected_rounds
from rayfed.reports.summary import (
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
    unit,
)
from rayfed.reports.tables import CHOSEN, MEAN, ResultTable, Stars, make_table

OOD = "ood"
_UNSEEN_CAPTIONS = {"downloaded": "with the downloaded model", "adapted": "after evaluate.adapt_epochs local epochs"}

_OF_CLIENTS = {
    "": "Means are over clients.",
    "AVG": "AVG: mean over clients.",
    "worst 10 %": "best (worst) 10 %: mean over the best (worst) tenth of the clients.",
    "worst": "worst: the worst client.",
}
"""What columns mean, by header; under "", what is said where there is no AVG."""
_OF_SERVER = {
    "": "Values are the server's.",
    "AVG": "AVG: mean over the server's values, one for each domain if it has several.",
    "worst 10 %": "best (worst) 10 %: mean over the best (worst) tenth of them.",
    "worst": "worst: the worst of them.",
}


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


def sections(
    tables: Tables,
    summary: Summary,
    view: View,
    stars: Mapping[str, Stars] | None = None,
    published: Mapping[str, Published] = MappingProxyType({}),
) -> list[Section]:
    """Return the tables of the report; see `rayfed.reports.render.render` for the arguments and errors.

    `published` has the values of others by experiment.
    """
    rows = filter_rows(summary.rows, tables, view)
    parts = []
    for name, of_experiment in rows.groupby("experiment"):
        experiment = str(name)
        metric = str(of_experiment["metric"].iloc[0])
        maker = _SectionMaker(experiment, tables, summary, metric, published.get(experiment))
        stars_here = None if stars is None else stars.get(experiment)
        main = maker.section(of_experiment, view.rule, stars_here)
        parts.append(main)
        parts += maker.unseen(main.split)
        if view.split is None and main.split != OOD:
            parts += maker.out_of_domain(view.rule)
    return parts


def reported_rows(summary: Summary, tables: Tables, view: View) -> pd.DataFrame:
    """Return the rows of the summary that `sections` shows, under all rules and with all quantities."""
    rows = filter_rows(summary.rows, tables, view)
    shown = rows[["experiment", "split", "metric"]].drop_duplicates()
    metrics = shown[["experiment", "metric"]].drop_duplicates()
    of_metric = summary.rows.merge(metrics)
    parts = [rows, _unseen_rows(of_metric).merge(shown)]
    if view.split is None:
        has_table = rows.loc[rows["split"] == OOD, "experiment"]
        wanted = set(rows["experiment"]) - set(has_table)
        ood = _ood_rows(of_metric)
        parts.append(ood[ood["experiment"].isin(wanted)])
    return pd.concat(parts, ignore_index=True)


def _unseen_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of unseen clients, with `chosen_by_default` as `chosen`."""
    rows = rows[rows["unseen"] & (rows["rule"] == "final")]
    return rows.assign(chosen=rows["chosen_by_default"])


def _ood_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of domains that no client holds, with `chosen_by_default` as `chosen`."""
    rows = rows[~rows["unseen"] & (rows["split"] == OOD)]
    rows = at_default_points(rows, out_of_domain_points(rows))
    return rows.assign(chosen=rows["chosen_by_default"])


class _SectionMaker:
    """Makes the sections of one experiment."""

    def __init__(self, name: str, tables: Tables, summary: Summary, metric: str, published: Published | None = None):
        self.name = name
        self._published = published
        self.metric = metric
        self._tables = tables
        self._rows = summary.rows[summary.rows["experiment"] == name]
        self._shown = self._rows[self._rows["metric"] == metric]
        self._criterion = tables.criteria[name]
        self._counts = tables.counts[tables.counts["experiment"] == name]
        done = tables.done.loc[tables.done["experiment"] == name, [*TRIAL, "order", "seed", "leave_out"]]
        described = tables.trials[[*TRIAL, "partition_hash", "clients_scored"]]
        self._done = done.merge(described, on=TRIAL)

    def section(self, rows: pd.DataFrame, rule: str | None, stars: Stars | None = None) -> Section:
        """Return the section of `rows` of one split, for the participants."""
        shown, rule = rows_of_rule(rows, rule)
        split = str(shown["split"].iloc[0])
        table = make_table(shown, self.metric, stars)
        table, last_notes = self._with_published(table, split)
        what = f"{split} {self.metric}"
        if split == OOD:
            what = f"out-of-domain {self.metric} (split ood)"
        caption = RULE_CAPTIONS[rule].format(criterion=self._criterion)
        notes = score_notes(self._tables.counts, shown, rule)
        if split != OOD:
            notes = [*_not_shown(self._rows, rows, shown, what), *notes]
        return Section(
            experiment=self.name,
            split=split,
            title=f"{self.name}: {what}{unit(self.metric)}, {caption}; {self._mean_caption(table)}",
            table=table,
            legend=_sentences([*self._legend(table, shown, split, rule), _stars_legend(stars), *table.remarks]),
            label=f"{self.name}: {what}",
            notes=(*notes, *last_notes),
        )

    def _with_published(self, table: ResultTable, split: str) -> tuple[ResultTable, list[str]]:
        """Return the table with published values if there are some of this metric and split, and a note on them."""
        published = self._published
        if published is None or (published.metric, published.split) != (self.metric, split):
            return table, []
        orders = dict(zip(self._done["trial"], self._done["order"], strict=True))
        compared = with_published(table, published, orders)
        note = published_note(compared, published)
        return compared.table, [note] if note else []

    def unseen(self, split: str) -> Iterator[Section]:
        """Yield the sections of unseen clients. They are scored once, so no rule picks a round."""
        rows = _unseen_rows(self._shown)
        rows = rows[rows["split"] == split]
        for point, caption in _UNSEEN_CAPTIONS.items():
            at_point = rows[rows["point"] == point]
            if not at_point.empty:
                yield self._unseen_section(at_point, split, point, caption)

    def _unseen_section(self, rows: pd.DataFrame, split: str, point: str, caption: str) -> Section:
        table = make_table(rows, self.metric)
        what = f"unseen clients, {caption}: {split} {self.metric}{unit(self.metric)}"
        return Section(
            experiment=self.name,
            split=split,
            title=f"{self.name}: {what}; {self._mean_caption(table)}",
            table=table,
            legend=_sentences([_mark_legend(rows, self._criterion), *table.remarks]),
            label=f"{self.name}: unseen clients {point} {split} {self.metric}",
        )

    def out_of_domain(self, rule: str | None) -> Iterator[Section]:
        """Yield the section of domains that no client holds, if there are any."""
        rows = _ood_rows(self._shown)
        if rows.empty:
            return
        has_rule = rows["rule"].eq(rule).any()
        yield self.section(rows, rule if has_rule else None)

    def _mean_caption(self, table: ResultTable) -> str:
        in_table = self._done["order"].isin(table.orders)
        return mean_caption(self._done[in_table])

    def _legend(self, table: ResultTable, shown: pd.DataFrame, split: str, rule: str) -> Iterator[str]:
        of_server = is_of_server(self._counts, split, self.metric)
        yield from _column_legend(table, of_server=of_server)
        yield _mark_legend(shown, self._criterion)
        yield _points(shown)
        if rule == "selected":
            yield self._rounds_chosen(shown)

    def _rounds_chosen(self, shown: pd.DataFrame) -> str:
        curves = self._tables.curves
        means = curves[curves["quantity"] == "mean"]
        picked = selected_rounds(means, self._tables.criteria)
        rounds = picked.merge(self._done[[*TRIAL, "order"]], on=TRIAL)
        rounds = rounds.merge(shown[["order", "algorithm", "unseen", "point"]].drop_duplicates())
        words = []
        for name, of_algorithm in rounds.groupby("algorithm")["round"]:
            low = of_algorithm.min()
            high = of_algorithm.max()
            span = f"{low} to {high}" if high > low else f"{low}"
            words.append(f"{name} {span}")
        return f"Rounds chosen: {', '.join(words)}."


def _sentences(parts: list[str]) -> str:
    return " ".join(filter(None, parts))


def _column_legend(table: ResultTable, *, of_server: bool) -> Iterator[str]:
    """Yield what the columns after those of domains mean."""
    headers = {column.header for column in table.columns}
    words = _OF_SERVER if of_server else _OF_CLIENTS
    yield words[MEAN] if MEAN in headers else words[""]
    for header in ("worst 10 %", "worst"):
        if header in headers:
            yield words[header]


def _not_shown(rows: pd.DataFrame, scored: pd.DataFrame, shown: pd.DataFrame, what: str) -> list[str]:
    """Return notes on the methods that have finished trials and are not in the table.

    `rows` has the rows of all methods, `scored` those of the split and the model scored under any rule, and `shown`
    those of the table. `what` names the split and the metric.
    """
    notes = []
    for why, have, lack in (
        ("at the model scored", rows, scored),
        ("in the round that the rule picks", scored, shown),
    ):
        names = _missing(have, lack)
        if names:
            notes.append(f"Not shown, because they have no {what} {why}: {'; '.join(names)}.")
    return notes


def _missing(have: pd.DataFrame, lack: pd.DataFrame) -> list[str]:
    """Return the names of the methods in `have` that are not in `lack`."""
    missing = have[~have["order"].isin(lack["order"])]
    whole = ~missing["algorithm"].isin(lack["algorithm"])  # no hyperparameters of the algorithm are shown
    with_hyperparameters = missing["algorithm"] + " " + missing["hyperparameters"]
    labels = missing["algorithm"].where(whole | missing["hyperparameters"].eq(""), with_hyperparameters)
    return sorted(set(labels))


def _points(rows: pd.DataFrame) -> str:
    several = rows.groupby("algorithm")["point"].transform("nunique") > 1  # labels then need the hyperparameters
    with_hyperparameters = rows["algorithm"] + " (" + rows["hyperparameters"] + ")"
    labels = rows["algorithm"].where(~several, with_hyperparameters)
    methods = labels.groupby(rows["point"]).unique()
    if len(methods) == 1:
        return f"Model scored: {methods.index[0]}."
    words = []
    for point in POINTS:
        if point in methods:
            words.append(f"{point} of {', '.join(sorted(methods[point]))}")
    return f"Model scored: {'; '.join(words)}."


def _mark_legend(rows: pd.DataFrame, criterion: str) -> str:
    groups = rows.groupby("algorithm")["order"].transform("nunique")
    tuned = rows[groups > 1]
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
