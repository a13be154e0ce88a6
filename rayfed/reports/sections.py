"""The tables of a report with their titles, legends and notes: one for each split and kind of clients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import pandas as pd

from rayfed.core.round_record import POINTS
from rayfed.records.published import Published
from rayfed.reports.choice import BY_SEED
from rayfed.reports.grid import edge_words
from rayfed.reports.published import published_note, with_published
from rayfed.reports.read import Tables
from rayfed.reports.selection import DOMAIN, FEW_CLIENTS, TRIAL, selected_rounds
from rayfed.reports.summary import (
    RULE_CAPTIONS,
    Summary,
    View,
    at_default_points,
    coverage_words,
    filter_rows,
    is_of_server,
    mean_caption,
    out_of_domain_points,
    rows_of_rule,
    score_notes,
    unit,
    without_rejected,
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
        emphasis: What bold and underlined numbers are, if they are not the best of all rows.
        coverage: Those of `notes` without which the numbers are misread: the clients that means are over.
    """

    experiment: str
    split: str
    title: str
    table: ResultTable
    legend: str
    label: str
    notes: tuple[str, ...] = ()
    emphasis: str = ""
    coverage: tuple[str, ...] = ()


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
        maker = _SectionMaker(experiment, tables, summary, metric, published.get(experiment), only_chosen=view.chosen)
        stars_here = None
        if stars is not None:
            stars_here = stars.get(experiment)
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

    def __init__(
        self,
        name: str,
        tables: Tables,
        summary: Summary,
        metric: str,
        published: Published | None = None,
        *,
        only_chosen: bool,
    ):
        self.name = name
        self._published = published
        self._only_chosen = only_chosen
        self.metric = metric
        self._tables = tables
        self._rows = summary.rows[summary.rows["experiment"] == name]
        self._shown = self._rows[self._rows["metric"] == metric]
        self._criterion = tables.criteria[name]
        self._counts = tables.counts[tables.counts["experiment"] == name]
        is_here = tables.done["experiment"] == name
        done = tables.done.loc[is_here, [*TRIAL, "order", "seed", "leave_out"]]
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
        coverage = tuple(self._coverage_notes(shown, split))
        notes = [
            *coverage,
            *self._edge_notes(shown),
            *score_notes(self._tables.counts, shown, rule),
        ]
        if split != OOD:
            notes = [*_not_shown(self._rows_to_show(), rows, shown, what), *notes]
        own_legend = self._legend(table, shown, split, rule)
        return Section(
            experiment=self.name,
            split=split,
            title=f"{self.name}: {what}{unit(self.metric)}, {caption}; {self._mean_caption(table)}",
            table=table,
            legend=_sentences([*own_legend, _stars_legend(stars), *table.remarks]),
            label=f"{self.name}: {what}",
            notes=(*notes, *last_notes),
            emphasis=_emphasis(table),
            coverage=coverage,
        )

    def _with_published(self, table: ResultTable, split: str) -> tuple[ResultTable, list[str]]:
        """Return the table with published values if there are some of this metric and split, and a note on them."""
        published = self._published
        if published is None or (published.metric, published.split) != (self.metric, split):
            return table, []
        orders = dict(zip(self._done["trial"], self._done["order"], strict=True))
        compared = with_published(table, published, orders)
        note = published_note(compared, published)
        if note:
            return compared.table, [note]
        return compared.table, []

    def _coverage_notes(self, shown: pd.DataFrame, split: str) -> list[str]:
        """Return notes on clients whose examples leave the metric undefined, for the table and for the choice."""
        is_shown = self._done["order"].isin(shown["order"])
        trials = self._done.loc[is_shown, TRIAL].drop_duplicates()
        counts = self._counts[~self._counts["unseen"]].merge(trials, on=TRIAL)
        notes = []
        words = coverage_words(counts, split, self.metric)
        if words:
            without = self._without(shown, split)
            notes.append(f"AVG and worst of {split} {self.metric} are over {words}{without}.")
        words = coverage_words(counts, "val", self._criterion)
        if words:
            notes.append(f"Validation {self._criterion}, which chooses, is over {words}.")
        return notes

    def _without(self, shown: pd.DataFrame, split: str) -> str:
        """Return ", without a, b", the domains that have other scores on a split and none of the metric."""
        is_shown = self._rows["order"].isin(shown["order"])
        here = self._rows[is_shown & (self._rows["split"] == split)]
        of_domains = here[here["quantity"].str.startswith(DOMAIN)]
        scored = set(of_domains["quantity"])
        defined = set(of_domains.loc[of_domains["metric"] == self.metric, "quantity"])
        names = sorted(name.removeprefix(DOMAIN) for name in scored - defined)
        if not names or len(names) > FEW_CLIENTS:
            return ""
        return f", without {', '.join(names)}"

    def _edge_notes(self, shown: pd.DataFrame) -> list[str]:
        """Return a note on chosen hyperparameters at an edge of what was tried."""
        done = self._tables.done[self._tables.done["experiment"] == self.name]
        is_chosen = done["order"].isin(shown.loc[shown["chosen"], "order"])
        words = edge_words(done, done[is_chosen])
        if not words:
            return []
        return [f"Chosen at the edge of what was tried: {'; '.join(words)}. Values beyond it may be better."]

    def _rows_to_show(self) -> pd.DataFrame:
        if not self._only_chosen:
            return self._rows
        return without_rejected(self._rows.assign(chosen=self._rows["chosen_by_default"]))

    def unseen(self, split: str) -> Iterator[Section]:
        """Yield the sections of unseen clients. They are scored once, so no rule picks a round."""
        rows = self._to_show(_unseen_rows(self._shown))
        rows = rows[rows["split"] == split]
        for point, caption in _UNSEEN_CAPTIONS.items():
            at_point = rows[rows["point"] == point]
            if not at_point.empty:
                yield self._unseen_section(at_point, split, point, caption)

    def _to_show(self, rows: pd.DataFrame) -> pd.DataFrame:
        if self._only_chosen:
            return without_rejected(rows)
        return rows

    def _unseen_section(self, rows: pd.DataFrame, split: str, point: str, caption: str) -> Section:
        table = make_table(rows, self.metric)
        scores = f"{split} {self.metric}{unit(self.metric)}"
        what = f"unseen clients, {caption}: {scores}"
        return Section(
            experiment=self.name,
            split=split,
            title=f"{self.name}: {what}; {self._mean_caption(table)}",
            table=table,
            legend=_sentences([self._mark_legend(rows), *table.remarks]),
            label=f"{self.name}: unseen clients {point} {split} {self.metric}",
            emphasis=_emphasis(table),
        )

    def out_of_domain(self, rule: str | None) -> Iterator[Section]:
        """Yield the section of domains that no client holds, if there are any."""
        rows = self._to_show(_ood_rows(self._shown))
        if rows.empty:
            return
        has_rule = rows["rule"].eq(rule).any()
        if has_rule:
            yield self.section(rows, rule)
        else:
            yield self.section(rows, None)

    def _mean_caption(self, table: ResultTable) -> str:
        in_table = self._done["order"].isin(table.orders)
        return mean_caption(self._done[in_table])

    def _legend(self, table: ResultTable, shown: pd.DataFrame, split: str, rule: str) -> Iterator[str]:
        of_server = is_of_server(self._counts, split, self.metric)
        yield from _column_legend(table, of_server=of_server)
        yield self._tables.splits[self.name].sentence()
        yield self._mark_legend(shown)
        yield _points(shown)
        if rule == "selected":
            yield self._rounds_chosen(shown)

    def _mark_legend(self, rows: pd.DataFrame) -> str:
        """Return what † means, or why there is none where hyperparameters were varied."""
        mark = CHOSEN
        groups = rows.groupby("algorithm")["order"].transform("nunique")
        tuned = rows[groups > 1]
        if self._only_chosen:
            mark = "Hyperparameters"
            tuned = rows[rows["algorithm"].isin(_tuned(self._rows))]
        if tuned.empty:
            return ""
        if not tuned["chosen"].any():
            return f"No hyperparameters are marked as chosen, because the model scored has no {self._choosing}."
        if (tuned["hyperparameters"] == BY_SEED).any():
            return (
                f"{mark}: those with the best {self._choosing} at each seed. Seeds choose for themselves, because a "
                "test example of one seed is a validation example of another."
            )
        if self._only_chosen:
            return f"Hyperparameters: those of each algorithm with the best mean {self._choosing}."
        return f"{CHOSEN}: the algorithm's hyperparameters with the best mean {self._choosing}."

    @property
    def _choosing(self) -> str:
        return f"validation {self._criterion}"

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
            if high > low:
                span = f"{low} to {high}"
            else:
                span = f"{low}"
            words.append(f"{name} {span}")
        return f"Rounds chosen: {', '.join(words)}."


def _sentences(parts: list[str]) -> str:
    return " ".join(filter(None, parts))


def _column_legend(table: ResultTable, *, of_server: bool) -> Iterator[str]:
    """Yield what the columns after those of domains mean."""
    headers = {column.header for column in table.columns}
    if of_server:
        words = _OF_SERVER
    else:
        words = _OF_CLIENTS
    if MEAN in headers:
        yield words[MEAN]
    else:
        yield words[""]
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
            methods = "; ".join(names)
            notes.append(f"Not shown, because they have no {what} {why}: {methods}.")
    return notes


def _missing(have: pd.DataFrame, lack: pd.DataFrame) -> list[str]:
    """Return the names of the methods in `have` that are not in `lack`."""
    missing = have[~have["order"].isin(lack["order"])]
    whole = ~missing["algorithm"].isin(lack["algorithm"])  # no hyperparameters of the algorithm are shown
    with_hyperparameters = missing["algorithm"] + " " + missing["hyperparameters"]
    has_default = whole | missing["hyperparameters"].eq("")
    labels = missing["algorithm"].where(has_default, with_hyperparameters)
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
            names = ", ".join(sorted(methods[point]))
            words.append(f"{point} of {names}")
    return f"Model scored: {'; '.join(words)}."


def _tuned(rows: pd.DataFrame) -> set[str]:
    """Return the algorithms that ran with several hyperparameters."""
    groups = rows.groupby("algorithm")["order"].nunique()
    return set(groups.index[groups > 1])


def _emphasis(table: ResultTable) -> str:
    if not table.has_rejected:
        return ""
    return "Bold and underlined: the best and the second best among the rows that validation chose."


def _stars_legend(stars: Stars | None) -> str:
    if stars is None or not any(stars.marks.values()):
        return ""
    return f"*, **, ***: differs from {stars.against} with p below 0.05, 0.01, 0.001 ({stars.test})."
