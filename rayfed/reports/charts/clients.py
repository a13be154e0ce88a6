"""The heat map of clients over rounds: which clients a method serves, and when."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.round_record import is_fraction
from rayfed.reports.charts.chart import WIDTH, Chart, ChartData, drawn_methods, inline, with_methods
from rayfed.reports.selection import TRIAL

_MOST_PANELS = 4  # methods
_MOST_ROWS = 40  # clients of a panel; with more, a row is the mean of several
_MOST_COLUMNS = 60  # rounds of a panel; with more, a column is the mean of several
_MOST_LABELS = 10  # of the axis of rounds
_ROW_HEIGHT = 12
_LEAST_HEIGHT = 60
_ENDS = (2, 98)  # percentiles at which the colours of values without bounds end


class _Panel(NamedTuple):
    """The map of one method: `cells` has a row for each rectangle, `names` are the rows from top to bottom.

    Columns of `cells`: round (the first one), rounds, client (the name of the row), value.
    """

    title: str
    cells: pd.DataFrame
    names: list[str]


def over_rounds(data: ChartData) -> Chart:
    """Return a panel for each of the first four methods: a row per client, a column per round, its score as a colour.

    Raises:
        UsageError: No client was scored.
    """
    rows = with_methods(data.curves())
    methods, remark = drawn_methods(rows, _MOST_PANELS)
    drawn = methods[:_MOST_PANELS]
    panels = []
    most_clients = 0
    for method in drawn:
        first = rows[rows["method"] == method].iloc[0]
        values, seeds = _scores(data, int(first["order"]), str(first["point"]))
        if values.empty:
            continue
        most_clients = max(most_clients, values["client"].nunique())
        panels.append(_panel(f"{method}, {seeds}", values, higher_is_better=bool(first["higher_is_better"])))
    if not panels:
        raise UsageError(f"plot: no client has a value of {data.split} {data.metric}")
    caption = f"{data.experiment}: {data.score_title} of each client over rounds{_binned_words(most_clients)}"
    if len(methods) > len(drawn):
        caption += f"; {len(methods) - len(drawn)} more methods are not drawn"
    return Chart(_chart(panels, data, bool(rows["higher_is_better"].iloc[0])), caption, remark)


def _binned_words(clients: int) -> str:
    if clients <= _MOST_ROWS:
        return ""
    return "; a row is the mean of several clients, in the order of their mean over all rounds, the best above"


def _scores(data: ChartData, order: int, point: str) -> tuple[pd.DataFrame, str]:
    """Return the scores of the clients of one method, a mean over seeds, and the seeds in words.

    The columns are client, domain, round and value. If seeds have different partitions, client 3 of one seed is not
    client 3 of another, so that the first seed is shown alone.
    """
    trials = data.trials[data.trials["order"] == order].sort_values("seed")
    recorded = data.tables.trials.merge(trials[TRIAL].drop_duplicates(), on=TRIAL)
    seeds = sorted(recorded["seed"].unique())
    if recorded["partition_hash"].nunique(dropna=False) > 1:
        seeds = seeds[:1]
    wanted = set(recorded.loc[recorded["seed"].isin(seeds), "trial"])
    parts = []
    for scores in data.tables.scores:
        if wanted.isdisjoint(scores.reduced.counts["trial"]):
            continue
        parts.append(scores.of_clients(point, data.split, data.metric))
    values = pd.concat(parts).dropna(subset="value")
    domains = values.drop_duplicates(["client", "domain"]).groupby("client")["domain"].agg(_listed)
    means = values.groupby(["client", "round"], as_index=False)["value"].mean()
    words = f"seed {seeds[0]}"
    if len(seeds) > 1:
        words = f"mean over {len(seeds)} seeds"
    return means.assign(domain=means["client"].map(domains)), words


def _listed(names: pd.Series) -> str:
    return ", ".join(sorted(names))


def _panel(title: str, values: pd.DataFrame, *, higher_is_better: bool) -> _Panel:
    """Return the map of `values`: client, domain, round, value."""
    rounds = np.sort(values["round"].unique())
    starts, words = _bins(rounds, _MOST_COLUMNS)
    column = np.searchsorted(starts, values["round"].to_numpy(int), side="right") - 1
    names, row = _rows(values, higher_is_better=higher_is_better)
    cells = pd.DataFrame({"row": row, "column": column, "value": values["value"]})
    cells = cells.groupby(["row", "column"], as_index=False)["value"].mean()
    cells["round"] = starts[cells["column"]]
    cells["rounds"] = np.array(words, object)[cells["column"]]
    cells["client"] = np.array(names, object)[cells["row"]]
    return _Panel(title, cells[["round", "rounds", "client", "value"]], names)


def _bins(numbers: np.ndarray, most: int) -> tuple[np.ndarray, list[str]]:
    """Return the first of each bin of sorted `numbers`, and the bins in words, such as 21–40; at most `most` bins."""
    bins = np.array_split(numbers, min(most, len(numbers)))
    words = []
    for held in bins:
        words.append(_span_words(int(held[0]), int(held[-1])))
    return np.array([held[0] for held in bins], int), words


def _span_words(first: int, last: int) -> str:
    if first == last:
        return str(first)
    return f"{first}–{last}"


def _rows(values: pd.DataFrame, *, higher_is_better: bool) -> tuple[list[str], np.ndarray]:
    """Return the names of the rows, and the place of the row of each of `values`."""
    means = values.groupby("client")["value"].mean()
    if len(means) <= _MOST_ROWS:
        clients = means.index.to_numpy()
        names = _client_names(values.drop_duplicates("client").sort_values("client"))
        return names, np.searchsorted(clients, values["client"].to_numpy(int))
    ranked = means.sort_values(ascending=not higher_is_better, kind="stable")
    rank = pd.Series(np.arange(1, len(ranked) + 1), ranked.index)
    starts, words = _bins(rank.to_numpy(), _MOST_ROWS)
    of_values = values["client"].map(rank).to_numpy(int)
    return words, np.searchsorted(starts, of_values, side="right") - 1


def _client_names(clients: pd.DataFrame) -> list[str]:
    """Return how the rows of `clients` are called: by domain if each has its own, else by number, or by both."""
    domains = list(map(str, clients["domain"]))
    numbers = clients["client"].tolist()
    if len(set(domains)) == len(domains) and "" not in domains:
        return domains
    if len(set(domains)) == 1:
        return [str(number) for number in numbers]
    return [f"{number} {domain}" for number, domain in zip(numbers, domains, strict=True)]


def _chart(panels: Sequence[_Panel], data: ChartData, higher_is_better: bool) -> Any:
    columns = min(2, len(panels))
    width = WIDTH
    if columns > 1:
        width = 270  # beside the names of rows
    values = pd.concat([panel.cells["value"] for panel in panels]) * data.scale
    colour = _colour(values.to_numpy(float), data, higher_is_better)
    maps = []
    for panel in panels:
        height = max(_LEAST_HEIGHT, _ROW_HEIGHT * len(panel.names))
        maps.append(_map(panel, data, colour).properties(width=width, height=height, title=panel.title))
    return alt.concat(*maps, columns=columns)


def _colour(values: np.ndarray, data: ChartData, higher_is_better: bool) -> alt.Color:
    """Return one scale for all panels, on which yellow is the best; a value without bounds may hide all others."""
    ends = [values.min(), values.max()]
    if not is_fraction(data.metric):
        ends = np.percentile(values, _ENDS).tolist()
    scale = alt.Scale(scheme="viridis", domain=[float(f"{end:.3g}") for end in ends], reverse=not higher_is_better)
    scale.clamp = True
    legend = alt.Legend(orient="bottom", gradientLength=240)
    return alt.Color("y:Q", scale=scale, title=data.score_title, legend=legend)


def _map(panel: _Panel, data: ChartData, colour: alt.Color) -> Any:
    frame = panel.cells.assign(y=panel.cells["value"] * data.scale)
    frame = frame[["round", "rounds", "client", "y"]]
    title = "client"
    if len(panel.names) == _MOST_ROWS:
        title = "clients by rank"
    starts = np.sort(frame["round"].unique())
    labelled = starts[:: math.ceil(len(starts) / _MOST_LABELS)].tolist()
    x = alt.X("round:O", title="round", axis=alt.Axis(labelAngle=0, values=labelled))
    y = alt.Y("client:N", sort=panel.names, title=title, axis=alt.Axis(labelLimit=110, labelOverlap="greedy"))
    tooltip = ["client:N", "rounds:N", alt.Tooltip("y:Q", title=data.score_title, format=".4~g")]
    return alt.Chart(inline(frame)).mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
