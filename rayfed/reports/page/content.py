"""The content of the page: the tables and charts of each experiment, its trials, and what is needed to repeat them."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from rayfed.core.errors import UsageError
from rayfed.core.options import key_path
from rayfed.records.trials import FIXED, recorded_configuration
from rayfed.reports.charts.chart import ChartData
from rayfed.reports.charts.kinds import chart_data, draw
from rayfed.reports.charts.style import MOST_LINES, styled
from rayfed.reports.pairs import all_pairs, paired_scores, stars_against_best
from rayfed.reports.queries import pairs_columns, pairs_notes
from rayfed.reports.read import Tables, list_experiments, of_experiment, read
from rayfed.reports.render import Section, sections
from rayfed.reports.result_table import Stars
from rayfed.reports.view import DEFAULT_SPLITS, View, filter_rows

_VERSIONS = tuple(name for name in FIXED if name.startswith("version_"))
_OF_A_VIEW = {
    "curves": "Curves",
    "bytes": "Against the bytes sent",
    "epsilon": "Against the privacy budget spent",
    "sensitivity": "Sensitivity",
    "clients": "Clients",
}
_OF_THE_EXPERIMENT = {
    "tsne": "Maps of representations",
    "time": "Where the time went",
}
_MOST_CHARACTERS = 2_000_000
"""Of the data of a chart; the page names the command that draws a larger one."""
_FAILED = ("failed", "diverged", "lost")


@dataclass(frozen=True)
class Picture:
    """A chart of the page: its heading, its caption, and its number in `Page.charts`, or the command that draws it."""

    heading: str
    caption: str
    number: int | None
    command: str


@dataclass(frozen=True)
class PageView:
    """What the page shows of one metric and one split.

    Attributes:
        metric, split: the metric and the split.
        sections: the tables; the first is that of the participants.
        stars: the p-values and stars of the first table.
        pairs: the comparison of all pairs: title, columns and notes; empty if there is none.
        pictures: the charts.
    """

    metric: str
    split: str
    sections: list[Section]
    stars: Stars
    pairs: Mapping[str, Any]
    pictures: list[Picture]


@dataclass(frozen=True)
class Failures:
    """The trials of one method that did not end, in the table of results."""

    algorithm: str
    hyperparameters: str
    count: int
    trials: int


@dataclass(frozen=True)
class Experiment:
    """Everything that the page shows of one experiment.

    Attributes:
        name: its name.
        views: what is shown for each metric and split.
        notes: sentences that hold for all of them.
        pictures: the charts that are the same for all of them.
        partitions: the chart of the partitions, if they were recorded.
        failures: by `order`, the methods with trials that did not end.
        few: whether the page shows the hyperparameters that validation chose, and others when they are asked for.
        trials: a row for each trial.
        versions: the distinct combinations of installed versions.
        configurations: of each method, as YAML.
    """

    name: str
    views: list[PageView]
    notes: list[str]
    pictures: list[Picture]
    partitions: list[Picture]
    failures: Mapping[int, Failures]
    few: bool
    trials: list[Mapping[str, Any]]
    versions: list[str]
    configurations: list[Mapping[str, str]]


@dataclass(frozen=True)
class Page:
    """The experiments, and all charts in Vega-Lite's JSON."""

    folder: str
    experiments: list[Experiment]
    charts: list[Mapping[str, Any]] = field(default_factory=list)


def page_content(folder: str | Path, experiment: str | None, view: View) -> Page:
    """Return what the page shows of `experiment`, or of every experiment in `folder`.

    Raises:
        UsageError: there are no results, or none of the view.
    """
    names = list_experiments(folder) if experiment is None else [experiment]
    tables = read(folder, experiment, select=view.select)
    page = Page(str(folder), [])
    for name in names:
        data = chart_data(folder, of_experiment(tables, name), view)
        page.experiments.append(_experiment(page, data, name))
    return page


def configuration(trial: pd.Series) -> dict[str, Any]:
    """Return the configuration of a row of the table `trials` as a nested mapping, which `rayfed run` reads.

    The folder of the results and the name of the experiment are left out, and so are values that are null.
    """
    tree: dict[str, Any] = {}
    for key, value in recorded_configuration(trial.to_dict()).items():
        *parents, last = key_path(key)
        branch = tree
        for parent in parents:
            branch = branch.setdefault(parent, {})
        branch[last] = value
    return {key: value for key, value in tree.items() if value != {}}


def configurations(tables: Tables) -> Iterator[dict[str, str]]:
    """Yield for each method its label and its configuration as YAML, with the seeds that were run."""
    done = tables.done
    for _, group in done.groupby("order"):
        group = group.sort_values("seed")
        trial = tables.trials[tables.trials["trial"] == group["trial"].iloc[0]].iloc[0]
        seeds = ", ".join(map(str, sorted(set(group["seed"]))))
        code = _text(trial.get("code_hash"))
        own = f" It names code of your own, which must be the same (code_hash {code})." if code else ""
        head = f"# rayfed run FILE.yaml seed=N; seeds of this table: {seeds}.{own}\n"
        text = yaml.safe_dump(configuration(trial), sort_keys=False, default_flow_style=None, allow_unicode=True)
        label = " ".join(filter(None, [group["algorithm"].iloc[0], group["hyperparameters"].iloc[0]]))
        yield {"method": label, "yaml": head + text}


def _experiment(page: Page, data: ChartData, name: str) -> Experiment:
    tables, rows = data.tables, data.summary.rows
    first = True
    views = []
    for metric, split in _choices(data):
        try:
            views.append(_view(page, data, name, metric, split, with_ood=first))
        except UsageError:  # the metric has no values at the point or under the rule
            continue
        first = False
    methods = rows.drop_duplicates("order")
    return Experiment(
        name=name,
        views=views,
        notes=data.summary.notes,
        pictures=list(_pictures(page, data, name, _OF_THE_EXPERIMENT)),
        partitions=list(_pictures(page, data, name, {"partition": "Partitions"})),
        failures=_failures(tables),
        few=len(methods) > MOST_LINES and bool(methods["chosen_by_default"].any()),
        trials=list(_trials(tables)),
        versions=_versions(tables.trials),
        configurations=list(configurations(tables)),
    )


def _choices(data: ChartData) -> list[tuple[str, str]]:
    """Return the metrics and splits that the page can show, those of the view first."""
    rows = data.summary.rows
    choices = rows.loc[~rows["unseen"], ["metric", "split"]].drop_duplicates().itertuples(index=False, name=None)
    view = data.view
    return sorted(
        choices,
        key=lambda one: (
            one[0] != (view.metric or data.criterion),
            one[0],
            one[1] != view.split,
            DEFAULT_SPLITS.index(one[1]),
        ),
    )


def _view(page: Page, data: ChartData, name: str, metric: str, split: str, *, with_ood: bool) -> PageView:
    view = replace(data.view, metric=metric, split=split)
    filter_rows(data.summary.rows, data.tables, view)  # so that a view without values ends here
    pairs, stars = _pairs(data, view)
    of_all = replace(view, split=None) if with_ood and data.view.split is None else view
    tables = sections(data.tables, data.summary, of_all, {name: stars})
    pictures = list(_pictures(page, replace(data, view=view, given_summary=data.summary), name, _OF_A_VIEW))
    return PageView(metric, split, tables, stars, pairs, pictures)


def _pairs(data: ChartData, view: View) -> tuple[Mapping[str, Any], Stars]:
    """Return the comparison of all pairs, and the stars of each method; both are empty where nothing is compared."""
    try:
        pairs = all_pairs(paired_scores(data.tables, view, data.summary))
    except UsageError:  # fewer than two methods, or none that can be paired
        return {}, Stars()
    title = f"{pairs.scores.split} {pairs.scores.metric}, {pairs.scores.caption}"
    table = {"title": title, "columns": pairs_columns(pairs), "notes": pairs_notes(pairs)}
    return table, stars_against_best(pairs)


def _pictures(page: Page, data: ChartData, name: str, kinds: Mapping[str, str]) -> Iterator[Picture]:
    """Yield the charts that there is something to draw for, and add them to the page."""
    for kind, heading in kinds.items():
        try:
            chart = draw(kind, data)
        except UsageError:  # nothing to plot
            continue
        command = f"rayfed report {page.folder} --experiment {name} --plot {kind}.pdf --kind {kind}"
        spec = styled(chart.chart)
        if len(str(spec)) > _MOST_CHARACTERS:
            yield Picture(heading, "There is too much of it for a page.", None, command)
            continue
        page.charts.append(spec)
        yield Picture(heading, chart.caption.partition(": ")[2], len(page.charts) - 1, command)


def _failures(tables: Tables) -> dict[int, Failures]:
    return {
        int(order): Failures(
            str(group["algorithm"].iloc[0]),
            str(group["hyperparameters"].iloc[0]),
            int(group["status"].isin(_FAILED).sum()),
            len(group),
        )
        for order, group in tables.groups.groupby("order")
        if group["status"].isin(_FAILED).any()
    }


def _trials(tables: Tables) -> Iterator[dict[str, Any]]:
    last = tables.rounds[tables.rounds["stage"] == "round"].groupby("trial")["round"].max()
    columns = ("trial", "algorithm", "seed", "status", "error", "traceback", "partition_hash", "weights_hash")
    for _, trial in tables.trials.sort_values(["algorithm", "seed", "trial"]).iterrows():
        rounds, seconds = trial.get("rounds"), trial.get("seconds")
        yield {
            **{name: _text(trial.get(name)) or "" for name in columns},
            "failed": trial["status"] in _FAILED,
            "rounds": f"{int(last.get(trial['trial'], 0))} of {'?' if pd.isna(rounds) else int(rounds)}",
            "seconds": "-" if seconds is None or pd.isna(seconds) else f"{seconds:.1f}",
        }


def _versions(trials: pd.DataFrame) -> list[str]:
    """Return the distinct combinations of installed versions."""
    rows = trials[[name for name in _VERSIONS if name in trials]].drop_duplicates()
    return [
        ", ".join(f"{str(name).removeprefix('version_')} {_text(value) or '-'}" for name, value in row.items())
        for _, row in rows.iterrows()
    ]


def _text(value: Any) -> str | None:
    is_null = value is None or (isinstance(value, float) and math.isnan(value)) or value is pd.NA or value is pd.NaT
    return None if is_null else str(value)
