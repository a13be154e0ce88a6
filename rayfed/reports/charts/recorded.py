"""Charts of what runs recorded besides scores: partitions, maps of representations (t-SNE), and times."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.round_record import SECONDS
from rayfed.records.files import read_holdings, read_map
from rayfed.records.storage import Storage
from rayfed.reports.charts.chart import (
    COLOURS,
    WIDTH,
    Chart,
    ChartData,
    inline,
    method_label,
    of_methods,
    row_axis,
    some,
    with_methods,
)
from rayfed.reports.selection import TRIAL

_MOST_PANELS = 6  # of partitions
_MOST_BUBBLES = 50  # of clients or of classes; with more, the chart is a heat map
_MOST_MAPS = 6
_MOST_NAMES = 20  # of domains or classes in a legend
_FILE = re.compile(
    r"(?P<trial>.+)-round(?P<round>\d{1,9})-(?P<name>[^-]+)-(?P<point>[^-]+)-(?P<split>[^-]+)-(?P<layer>.*)\.parquet"
)
_PARTS = (*(part for part in SECONDS if part != "total"), "other")
"""The parts of a round's wall-clock time; `other` is the total less the measured parts."""


class _Partition(NamedTuple):
    """The numbers of examples for training and validation: `counts` are int64 [clients, classes].

    The title is the hash of the partition, and its seed if it is random.
    """

    title: str
    clients: list[int]
    domains: list[str]
    counts: np.ndarray


def all_partitions(data: ChartData) -> Chart:
    """Return a panel for each of the first six partitions of the trials."""
    partitions = _recorded_partitions(data.home, data.tables.trials)
    if not partitions:
        raise UsageError("plot: no partition was recorded with these results; rayfed partition --plot draws one")
    drawn = partitions[:_MOST_PANELS]
    columns = min(len(drawn), _panels_beside(drawn))
    panels = []
    for partition in drawn:
        panel = counts_panel(partition.clients, partition.domains, partition.counts, WIDTH // columns)
        panels.append(panel.properties(title=partition.title))
    caption = f"{data.experiment}: examples for training and validation by client and class"
    if len(partitions) > len(drawn):
        caption += f"; {len(partitions) - len(drawn)} more are not drawn"
    return Chart(alt.concat(*panels, columns=columns), caption)


def _panels_beside(partitions: Sequence[_Partition]) -> int:
    """Return how many panels fit beside each other."""
    clients = max(len(partition.clients) for partition in partitions)
    if clients <= 12:
        return 3
    if clients <= 25:
        return 2
    return 1


def _recorded_partitions(home: Storage, trials: pd.DataFrame) -> list[_Partition]:
    """Return the distinct partitions of `trials` that were recorded in the folder of the experiment, by seed."""
    partitions = []
    recorded = trials.dropna(subset="partition_hash").sort_values("seed")
    for digest, group in recorded.groupby("partition_hash", sort=False):
        holdings = read_holdings(home, str(digest))
        if holdings is None:
            continue
        title = str(digest)
        seed = group["partition_seed"].iloc[0]
        if not pd.isna(seed):
            title += f", seed {int(seed)}"
        partitions.append(_partition(title, holdings))
    return partitions


def _partition(title: str, holdings: pd.DataFrame) -> _Partition:
    fitted = holdings[holdings["split"] != "test"]
    counts = fitted.pivot_table(index="client", columns="label", values="count", aggfunc="sum", fill_value=0)
    classes = range(int(fitted["label"].max()) + 1)
    clients = [int(client) for client in counts.index]
    domains = fitted.drop_duplicates("client").set_index("client")["domain"]
    names = [str(domains[client]) for client in clients]
    return _Partition(title, clients, names, counts.reindex(columns=classes, fill_value=0).to_numpy())


def counts_panel(clients: Sequence[int], domains: Sequence[str], counts: np.ndarray, width: int = WIDTH) -> Any:
    """Return the chart of a partition: bubbles, or a heat map if there are many clients or classes.

    `clients` and `domains` are the numbers and domains of the clients; `counts` are their examples, int64 [clients,
    classes].
    """
    client, label = np.nonzero(counts)
    columns = {
        "client": np.asarray(clients)[client],
        "class": label,
        "domain": np.asarray(domains, dtype=object)[client],
        "examples": counts[client, label],
    }
    frame = pd.DataFrame(columns)
    chart = alt.Chart(inline(frame)).properties(width=width, height=240)
    chart = chart.encode(tooltip=["client:Q", "class:Q", "domain:N", "examples:Q"])
    if max(counts.shape) > _MOST_BUBBLES:
        return _heat_map(chart)
    area = alt.Scale(domainMin=0, range=[0, 260])
    return chart.mark_circle(opacity=0.75).encode(
        x=_axis(alt.X, "client:Q", clients),
        y=_axis(alt.Y, "class:Q", range(counts.shape[1])),
        size=alt.Size("examples:Q", scale=area, legend=None),
        color=_domain_colour(domains, width),
    )


def _heat_map(chart: Any) -> Any:
    x = alt.X("client:O", axis=alt.Axis(labelOverlap="greedy", labelAngle=0))
    y = alt.Y("class:O", sort="descending")
    scale = alt.Scale(scheme="viridis")
    colour = alt.Color("examples:Q", scale=scale, legend=alt.Legend(orient="bottom"))
    return chart.mark_rect().encode(x=x, y=y, color=colour)


def _domain_colour(domains: Sequence[str], width: int) -> Any:
    """Return colours that tell domains apart, or one colour if there is one domain, or too many."""
    names = list(dict.fromkeys(domains))
    if not 1 < len(names) <= len(COLOURS):
        return alt.value(COLOURS[0])
    colours = list(COLOURS[: len(names)])
    scale = alt.Scale(domain=names, range=colours)
    columns = max(2, width // 150)
    legend = alt.Legend(title=None, orient="bottom", columns=columns)
    return alt.Color("domain:N", scale=scale, legend=legend)


def _axis(channel: Any, name: str, numbers: Sequence[int]) -> Any:
    """Return an axis with a label for each of `numbers`, and space around them."""
    room = [min(numbers) - 1, max(numbers) + 1]
    scale = alt.Scale(domain=room, nice=False)
    return channel(name, axis=alt.Axis(values=list(numbers)), scale=scale)


def last_of_each_method(data: ChartData) -> Chart:
    """Return two panels for each method: the last map of its first seed by domain (or point) and by class."""
    home = data.home.child("maps")
    files = _map_files(home, data.trials)
    if files.empty:
        raise UsageError(
            "plot: no map of representations was written by a trial that is done; run with metrics.tsne=true"
        )
    panels = []
    for _, file in files.head(_MOST_MAPS).iterrows():
        panels += _map_panels(home, file)
    chart = alt.concat(*panels, columns=2).resolve_scale(color="independent")
    first = files.iloc[0]
    what = f"{first['point']} model, {first['split']} data"
    caption = f"{data.experiment}: map of representations, {what}"
    if len(files) > _MOST_MAPS:
        caption += f"; {len(files) - _MOST_MAPS} more methods are not drawn"
    return Chart(chart, caption)


def _map_files(home: Storage, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the last map of the first seed of each method: columns of `trials`, those in `_FILE`, and file."""
    rows = []
    for file in home.files():
        match = _FILE.fullmatch(file)
        if match:
            rows.append({**match.groupdict(), "file": file})
    columns = [*_FILE.groupindex, "file"]
    files = pd.DataFrame(rows, columns=columns).astype({"round": int})
    files = files.merge(trials, on="trial")
    keys = ["order", "seed", "round"]
    ordered = files.sort_values(keys, ascending=[True, True, False], kind="stable")
    return ordered.drop_duplicates("order")


def _map_panels(home: Storage, file: pd.Series) -> list[Any]:
    """Return two panels of a map: by domain, or by point for a map of several points, and by class."""
    points = read_map(home, str(file["file"]))
    origin = "domain"
    if file["point"] == "joint":
        origin = "point"
    panels = []
    for column, words in ((origin, origin), ("label", "class")):
        which = f"seed {file['seed']}, round {file['round']}"
        title = [method_label(file), f"{which}: by {words}"]
        panels.append(_map_panel(points, column).properties(title=title))
    return panels


def _map_panel(points: pd.DataFrame, column: str) -> Any:
    """Return the map of `points` (columns client, domain, label, x, y and point), coloured by `column`."""
    names = sorted(points[column].fillna("").unique())
    scale = alt.Scale(scheme="category20")
    if len(names) <= len(COLOURS):
        scale = alt.Scale(range=list(COLOURS))
    legend = None
    if len(names) <= _MOST_NAMES:
        legend = alt.Legend(title=None, orient="bottom", columns=4)
    plain = alt.Axis(labels=False, ticks=False, grid=False, title=None)
    around = alt.Scale(zero=False)
    columns = list(dict.fromkeys(["client", "domain", "label", "x", "y", column]))
    shown = inline(points[columns])
    chart = alt.Chart(shown).mark_circle(size=16, opacity=0.7)
    in_order = list(map(str, names))
    chart = chart.encode(
        x=alt.X("x:Q", axis=plain, scale=around),
        y=alt.Y("y:Q", axis=plain, scale=around),
        color=alt.Color(f"{column}:N", sort=in_order, scale=scale, legend=legend),
        tooltip=["client:N", "domain:N", "label:N"],
    )
    return chart.properties(width=WIDTH // 2, height=WIDTH // 2)


def seconds(data: ChartData) -> Chart:
    """Return a bar per method: the mean seconds of a round by part. Setup and final stage are shared among rounds."""
    rows = some(_seconds_of_methods(data))
    y, height = row_axis(rows)
    base = alt.Chart().encode(y=y)
    colours = list(COLOURS[: len(_PARTS)])
    scale = alt.Scale(domain=list(_PARTS), range=colours)
    legend = alt.Legend(title=None, orient="bottom", columns=3)
    colour = alt.Color("part:N", scale=scale, legend=legend)
    x = alt.X("seconds:Q", title="wall-clock seconds per round", axis=alt.Axis(tickCount=6))
    tooltip = ["method:N", "part:N", alt.Tooltip("seconds:Q", format=".3~g")]
    bars = base.mark_bar().encode(x=x, color=colour, order="place:Q", tooltip=tooltip)
    text = alt.Text("sum(seconds):Q", format=".3~g")
    end = alt.X("sum(seconds):Q")
    totals = base.mark_text(align="left", dx=4).encode(x=end, text=text)
    places = rows["part"].map(_PARTS.index)
    frame = rows.assign(place=places)[["method", "row", "part", "place", "seconds"]]
    layers = alt.layer(bars, totals, data=inline(frame))
    chart = layers.properties(width=WIDTH, height=height)
    return of_methods(chart, rows, f"{data.experiment}: where the time went, mean over rounds and seeds")


def _seconds_of_methods(data: ChartData) -> pd.DataFrame:
    """Return the mean seconds of a round by method and part, with the columns of `with_methods` and `chosen`."""
    means = some(_round_seconds(data.tables.rounds, data.trials)).reset_index()
    parts = means.melt("order", list(_PARTS), var_name="part", value_name="seconds")
    choices = data.summary.rows[["order", "chosen_by_default"]].drop_duplicates("order")
    choices = choices.rename(columns={"chosen_by_default": "chosen"})
    methods = data.trials[["order", "algorithm", "hyperparameters"]].drop_duplicates("order")
    return with_methods(parts.merge(methods.merge(choices, on="order"), on="order"))


def _round_seconds(rounds: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the mean seconds of a round: a row per order, a column for each of `_PARTS`."""
    measured = []
    for part in _PARTS:
        if part != "other":
            measured.append(f"seconds_{part}")
    rounds = rounds.merge(trials[[*TRIAL, "order"]], on=TRIAL)
    in_training = rounds["stage"] == "round"
    number = rounds[in_training].groupby("order").size()
    sums = rounds.groupby("order")[[*measured, "seconds_total"]].sum()
    means = sums.div(number, axis=0).dropna(how="all")
    total = means.pop("seconds_total")
    means["seconds_other"] = (total - means.sum(axis=1)).clip(lower=0)
    return means.rename(columns=lambda name: name.removeprefix("seconds_"))
