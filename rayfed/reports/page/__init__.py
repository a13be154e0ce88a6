"""The page of results, one HTML file that needs no network: tables, charts, trials, and how to repeat them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import yaml

from rayfed.core.errors import UsageError
from rayfed.core.paths import writing
from rayfed.records.trial_rows import FIXED
from rayfed.records.trials import recorded_configuration
from rayfed.reports.charts import chart_data, draw
from rayfed.reports.charts.chart import MOST_LINES, ChartData, styled
from rayfed.reports.choice import BY_SEED
from rayfed.reports.comparison import Pairs, compare
from rayfed.reports.pairs import pairs_columns, pairs_notes, pairs_title, stars_against
from rayfed.reports.published import published_values
from rayfed.reports.read import Tables, of_experiment, read_by_data
from rayfed.reports.render import restart_notes
from rayfed.reports.sections import Section, sections
from rayfed.reports.selection import FEW_CLIENTS
from rayfed.reports.summary import DEFAULT_SPLITS, DEFAULT_VIEW, View, filter_rows, nothing_to_show
from rayfed.reports.tables import Stars

_OF_A_VIEW = {
    "curves": "Curves",
    "bytes": "Against the bytes sent",
    "clock": "Over simulated time",
    "epsilon": "Against the privacy budget spent",
    "privacy": "Against the privacy budget of all rounds",
    "upload": "Against the bytes that clients sent in all rounds",
    "attacks": "Attacks and robust rules",
    "clients": "Clients over rounds",
    "sensitivity": "Sensitivity",
}
_OF_THE_EXPERIMENT = {"tsne": "Maps of representations", "time": "Where the time went"}
_MOST_CHARACTERS = 2_000_000
"""The longest data of a chart; for a longer one, the page names the command that draws it."""
_FAILED = ("failed", "diverged", "lost")


class Picture(NamedTuple):
    """A chart of the page: its number in `Page.charts`, None if it is too large; and the command that draws it."""

    heading: str
    caption: str
    number: int | None
    command: str


class PageView(NamedTuple):
    """What the page shows of one metric and one split.

    The first of `sections` is the participants' table, which has the `stars`. `pairs` has the heading, the title, the
    columns and the notes of each comparison. Stars and pairs are empty if nothing can be compared.
    """

    metric: str
    split: str
    sections: list[Section]
    stars: Stars
    pairs: list[Mapping[str, Any]]
    pictures: list[Picture]


class Experiment(NamedTuple):
    """Everything that the page shows of one experiment.

    Attributes:
        views: What is shown for each metric and split. Notes, pictures and partitions hold for all of them.
        nothing: The reason if there is no view.
        failures: Methods with failed trials by `order`: algorithm, hyperparameters, failed, trials.
        few: Whether the page opens with only the hyperparameters that validation chose.
        trials: A row for each trial.
        versions: The distinct combinations of installed versions.
        configurations: The configuration of each method, as YAML.
    """

    name: str
    views: list[PageView]
    nothing: str
    notes: list[str]
    pictures: list[Picture]
    partitions: list[Picture]
    failures: Mapping[int, Mapping[str, Any]]
    few: bool
    trials: list[Mapping[str, Any]]
    versions: list[str]
    configurations: list[Mapping[str, str]]


class Page(NamedTuple):
    """The experiments, and all charts in Vega-Lite's JSON; with `baseline`, methods are compared with that alone."""

    folder: str
    baseline: str | None
    experiments: list[Experiment]
    charts: list[Mapping[str, Any]]


def write_page(
    folder: str | Path,
    experiment: str | None,
    path: str | Path,
    view: View = DEFAULT_VIEW,
    baseline: str | None = None,
) -> None:
    """Write the page on `experiment`, or on every experiment in `folder`.

    It opens with the metric and the split of `view`; its reader can choose others. All methods are compared with
    `baseline` if it is given, and else with each other.

    Raises:
        UsageError: There are no results, or the file cannot be written.
    """
    page = page_html(folder, experiment, view, baseline)
    with writing(path):
        Path(path).write_text(page, encoding="utf-8")


def page_html(
    folder: str | Path, experiment: str | None = None, view: View = DEFAULT_VIEW, baseline: str | None = None
) -> str:
    """Return what `write_page` writes."""
    tables = read_by_data(folder, experiment, select=view.select)
    page = Page(str(folder), baseline, [], [])
    for name in sorted(tables.places):
        data = chart_data(of_experiment(tables, name), view)
        page.experiments.append(_experiment(page, data, name))
    return _filled_template(page)


def _filled_template(page: Page) -> str:
    import jinja2

    import rayfed

    loader = jinja2.PackageLoader("rayfed.reports.page", "")
    environment = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.globals["zip"] = zip
    charts = json.dumps(page.charts, ensure_ascii=False, separators=(",", ":"))
    template = environment.get_template("page.html")
    vega = ""
    if page.charts:
        vega = _vega()
    safe_charts = charts.replace("<", "\\u003c")
    return template.render(page=page, charts=safe_charts, vega=vega, version=rayfed.__version__)


@cache
def _vega() -> str:
    """Return the script of Vega, Vega-Lite and Vega-Embed."""
    import vl_convert

    script = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;"))
    return script.replace("</script", "<\\/script")


def configurations(tables: Tables) -> Iterator[dict[str, str]]:
    """Yield for each method its label and its configuration as YAML with dotted keys, and the seeds that were run."""
    own = tables.done[tables.done["hyperparameters"] != BY_SEED]
    for _, group in own.groupby("order"):
        ordered = group.sort_values("seed")
        first = ordered.iloc[0]
        is_first = tables.trials["trial"] == first["trial"]
        trial = tables.trials[is_first].iloc[0]
        label = " ".join(filter(None, [first["algorithm"], first["hyperparameters"]]))
        yield {"method": label, "yaml": _configuration(trial, ordered["seed"].unique())}


def _configuration(trial: pd.Series, seeds: Sequence[int]) -> str:
    """Return the configuration of a trial as YAML, below a comment that says how to run it with each of `seeds`."""
    head = f"# rayfed run FILE.yaml seed=N; seeds of this table: {', '.join(map(str, seeds))}."
    code = _text(trial.get("code_hash"))
    if code:
        head += f" It names code of your own, which must be the same (code_hash {code})."
    recorded = recorded_configuration(trial.to_dict())
    values = {}
    for key, value in recorded.items():
        if value != {}:
            values[key] = value
    text = yaml.safe_dump(values, sort_keys=False, default_flow_style=None, allow_unicode=True)
    return f"{head}\n{text}"


def _experiment(page: Page, data: ChartData, name: str) -> Experiment:
    tables = data.tables
    methods = data.summary.rows.drop_duplicates("order")
    some_by_default = bool(methods["chosen_by_default"].any())
    partitions = _pictures(page, data, name, {"partition": "Partitions"})
    return Experiment(
        name=name,
        views=_views(page, data, name),
        nothing=nothing_to_show(tables),
        notes=[*data.summary.notes, *restart_notes(page.folder, name)],
        pictures=list(_pictures(page, data, name, _OF_THE_EXPERIMENT)),
        partitions=list(partitions),
        failures=_failures(tables),
        few=len(methods) > MOST_LINES and some_by_default,
        trials=list(_trials(tables)),
        versions=_versions(tables.trials),
        configurations=list(configurations(tables)),
    )


def _views(page: Page, data: ChartData, name: str) -> list[PageView]:
    views: list[PageView] = []
    for metric, split in _choices(data):
        with suppress(UsageError):  # the metric has no values at the point or under the rule
            views.append(_view(page, data, name, metric, split, with_ood=not views))
    return views


def _choices(data: ChartData) -> list[tuple[str, str]]:
    """Return the metrics and splits that the page can show, those of the view first."""
    rows = data.summary.rows
    first_metric = data.view.metric or data.criterion

    def key(choice: tuple[str, str]) -> tuple[Any, ...]:
        metric, split = choice
        return metric != first_metric, metric, split != data.view.split, DEFAULT_SPLITS.index(split)

    choices = rows.loc[~rows["unseen"], ["metric", "split"]].drop_duplicates()
    return sorted(choices.itertuples(index=False, name=None), key=key)


def _view(page: Page, data: ChartData, name: str, metric: str, split: str, *, with_ood: bool) -> PageView:
    view = replace(data.view, metric=metric, split=split)
    filter_rows(data.summary.rows, data.tables, view)  # raises where the view has no values
    pairs, stars = _pairs(data, view, page.baseline)
    of_sections = view
    if with_ood and data.view.split is None:
        of_sections = replace(view, split=None)
    published = published_values(page.folder, [name])
    shown = sections(data.tables, data.summary, of_sections, {name: stars}, published)
    pictures = list(_pictures(page, replace(data, view=view), name, _OF_A_VIEW))
    return PageView(metric, split, shown, stars, pairs, pictures)


def _pairs(data: ChartData, view: View, baseline: str | None) -> tuple[list[Mapping[str, Any]], Stars]:
    """Return the comparisons of methods, also by domain, and the stars of each method.

    Both are empty if nothing can be compared.
    """
    try:
        pairs = compare(data.tables, view, summary=data.summary, baseline=baseline)
    except UsageError:  # fewer than two methods, or none that can be paired
        return [], Stars()
    stars = stars_against(pairs)
    shown = [_comparison(pairs, "Differences, intervals and tests")]
    with suppress(UsageError):  # a single domain
        by_domain = compare(data.tables, view, summary=data.summary, baseline=baseline, by="domain")
        if len({pair.site for pair in by_domain.comparisons}) <= FEW_CLIENTS:
            shown.append(_comparison(by_domain, "The same for each domain"))
    return shown, stars


def _comparison(pairs: Pairs, heading: str) -> Mapping[str, Any]:
    return {
        "heading": heading,
        "title": pairs_title(pairs),
        "columns": pairs_columns(pairs),
        "notes": pairs_notes(pairs),
    }


def _pictures(page: Page, data: ChartData, name: str, kinds: Mapping[str, str]) -> Iterator[Picture]:
    """Yield the charts that are not empty, and add them to the page."""
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
        _, _, caption = chart.caption.partition(": ")
        yield Picture(heading, caption, len(page.charts) - 1, command)


def _failures(tables: Tables) -> dict[int, dict[str, Any]]:
    groups = tables.groups.assign(failed=tables.groups["status"].isin(_FAILED))
    failed = groups.groupby(["order", "algorithm", "hyperparameters"])["failed"]
    counts = failed.agg(failed="sum", trials="count")
    failures = {}
    for row in counts.reset_index().to_dict("records"):
        if row["failed"]:
            failures[int(row["order"])] = row
    return failures


def _trials(tables: Tables) -> Iterator[dict[str, Any]]:
    in_training = tables.rounds["stage"] == "round"
    last_rounds = tables.rounds[in_training].groupby("trial")["round"].max()
    for _, trial in tables.trials.sort_values(["algorithm", "seed", "trial"]).iterrows():
        row: dict[str, Any] = {}
        for name in ("trial", "algorithm", "seed", "status", "error", "traceback", "partition_hash", "weights_hash"):
            row[name] = _text(trial.get(name)) or ""
        done = int(last_rounds.get(trial["trial"], 0))
        row["failed"] = trial["status"] in _FAILED
        planned = _formatted(trial.get("rounds"), ".0f", "?")
        row["rounds"] = f"{done} of {planned}"
        row["seconds"] = _formatted(trial.get("seconds"), ".1f", "-")
        yield row


def _formatted(value: float | None, form: str, missing: str) -> str:
    if value is None or pd.isna(value):
        return missing
    return format(value, form)


def _versions(trials: pd.DataFrame) -> list[str]:
    """Return the distinct combinations of installed versions."""
    names = [name for name in FIXED if name.startswith("version_")]
    versions = []
    for row in trials[names].drop_duplicates().to_dict("records"):
        words = []
        for name, value in row.items():
            package = name.removeprefix("version_")
            words.append(f"{package} {_text(value) or '-'}")
        versions.append(", ".join(words))
    return versions


def _text(value: Any) -> str | None:
    if pd.isna(value):
        return None
    return str(value)
