"""Charts of what runs recorded besides scores: partitions, maps of representations (t-SNE), and times."""

import io
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.records import SECONDS
from rayfed.records.files import read_holdings
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
    r"(?P<trial>.+)-round(?P<round>\d+)-(?P<name>[^-]+)-(?P<point>[^-]+)-(?P<split>[^-]+)-(?P<layer>.*)\.parquet"
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
    clients = max(len(partition.clients) for partition in drawn)
    columns = min(len(drawn), 3 if clients <= 12 else 2 if clients <= 25 else 1)
    panels = [
        counts_panel(partition.clients, partition.domains, partition.counts, WIDTH // columns).properties(
            title=partition.title
        )
        for partition in drawn
    ]
    more = f"; {len(partitions) - len(drawn)} more are not drawn" if len(partitions) > len(drawn) else ""
    caption = f"{data.experiment}: examples for training and validation by client and class{more}"
    return Chart(alt.concat(*panels, columns=columns), caption)


def _recorded_partitions(home: Storage, trials: pd.DataFrame) -> list[_Partition]:
    """Return the distinct partitions of `trials` that were recorded in the folder of the experiment, by seed."""
    partitions = []
    recorded = trials.dropna(subset="partition_hash").sort_values("seed")
    for digest, group in recorded.groupby("partition_hash", sort=False):
        if (holdings := read_holdings(home, str(digest))) is None:
            continue
        seeds = group["partition_seed"].head(1).dropna()
        title = ", ".join([str(digest), *(f"seed {int(seed)}" for seed in seeds)])
        holdings = holdings[holdings["split"] != "test"]
        counts = holdings.pivot_table(index="client", columns="label", values="count", aggfunc="sum", fill_value=0)
        counts = counts.reindex(columns=range(int(holdings["label"].max()) + 1), fill_value=0)
        domains = holdings.drop_duplicates("client").set_index("client")["domain"]
        clients = [int(client) for client in counts.index]
        partitions.append(_Partition(title, clients, [str(domains[client]) for client in clients], counts.to_numpy()))
    return partitions


def counts_panel(clients: Sequence[int], domains: Sequence[str], counts: np.ndarray, width: int = WIDTH) -> Any:
    """Return the chart of a partition: bubbles, or a heat map if there are many clients or classes.

    `clients` and `domains` are the numbers and domains of the clients; `counts` are their examples, int64 [clients,
    classes].
    """
    client, label = np.nonzero(counts)
    frame = pd.DataFrame(
        {
            "client": np.asarray(clients)[client],
            "class": label,
            "domain": np.asarray(domains, dtype=object)[client],
            "examples": counts[client, label],
        }
    )
    chart = alt.Chart(inline(frame)).properties(width=width, height=240)
    tooltip = ["client:Q", "class:Q", "domain:N", "examples:Q"]
    if max(counts.shape) > _MOST_BUBBLES:
        x = alt.X("client:O", axis=alt.Axis(labelOverlap="greedy", labelAngle=0))
        y = alt.Y("class:O", sort="descending")
        colour = alt.Color("examples:Q", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(orient="bottom"))
        return chart.mark_rect().encode(x=x, y=y, color=colour, tooltip=tooltip)
    names = sorted(set(domains), key=list(domains).index)
    few = 1 < len(names) <= len(COLOURS)
    scale = alt.Scale(domain=names, range=list(COLOURS[: len(names)]))
    legend = alt.Legend(title=None, orient="bottom", columns=max(2, width // 150))
    return chart.mark_circle(opacity=0.75).encode(
        x=_axis(alt.X, "client:Q", clients),
        y=_axis(alt.Y, "class:Q", range(counts.shape[1])),
        size=alt.Size("examples:Q", scale=alt.Scale(domainMin=0, range=[0, 260]), legend=None),
        color=alt.Color("domain:N", scale=scale, legend=legend) if few else alt.value(COLOURS[0]),
        tooltip=tooltip,
    )


def _axis(channel: Any, name: str, numbers: Sequence[int]) -> Any:
    """Return an axis with a label for each of `numbers`, and space around them."""
    scale = alt.Scale(domain=[min(numbers) - 1, max(numbers) + 1], nice=False)
    return channel(name, axis=alt.Axis(values=list(numbers)), scale=scale)


def last_of_each_method(data: ChartData) -> Chart:
    """Return two panels for each method: the last map of its first seed by domain (or point) and by class."""
    home, trials = data.home.child("maps"), data.trials
    found = [{**match.groupdict(), "file": match[0]} for file in home.files() if (match := _FILE.fullmatch(file))]
    files = pd.DataFrame(found, columns=[*_FILE.groupindex, "file"])
    files = files.assign(round=files["round"].astype(int)).merge(trials, on="trial")
    files = files.sort_values(["order", "seed", "round"], ascending=[True, True, False], kind="stable")
    files = files.drop_duplicates("order")
    if files.empty:
        raise UsageError(
            "plot: no map of representations was written by a trial that is done; run with metrics.tsne=true"
        )
    panels = [
        _map_panel(pd.read_parquet(io.BytesIO(home.read(str(file["file"])))), column).properties(
            title=[method_label(file), f"seed {file['seed']}, round {file['round']}: by {words}"]
        )
        for _, file in files.head(_MOST_MAPS).iterrows()
        for column, words in (("point" if file["point"] == "joint" else "domain",) * 2, ("label", "class"))
    ]
    first = files.iloc[0]
    caption = f"{data.experiment}: map of representations, {first['point']} model, {first['split']} data"
    more = f"; {len(files) - _MOST_MAPS} more methods are not drawn" if len(files) > _MOST_MAPS else ""
    return Chart(alt.concat(*panels, columns=2).resolve_scale(color="independent"), caption + more)


def _map_panel(points: pd.DataFrame, column: str) -> Any:
    """Return the map of `points` (columns client, domain, label, x, y and point), coloured by `column`."""
    names = sorted(points[column].fillna("").unique())
    scale = alt.Scale(range=list(COLOURS)) if len(names) <= len(COLOURS) else alt.Scale(scheme="category20")
    legend = alt.Legend(title=None, orient="bottom", columns=4) if len(names) <= _MOST_NAMES else None
    plain = alt.Axis(labels=False, ticks=False, grid=False, title=None)
    around = alt.Scale(zero=False)
    columns = list(dict.fromkeys(["client", "domain", "label", "x", "y", column]))
    chart = alt.Chart(inline(points[columns])).mark_circle(size=16, opacity=0.7)
    return chart.encode(
        x=alt.X("x:Q", axis=plain, scale=around),
        y=alt.Y("y:Q", axis=plain, scale=around),
        color=alt.Color(f"{column}:N", sort=[str(name) for name in names], scale=scale, legend=legend),
        tooltip=["client:N", "domain:N", "label:N"],
    ).properties(width=WIDTH // 2, height=WIDTH // 2)


def seconds(data: ChartData) -> Chart:
    """Return a bar per method: the mean seconds of a round by part. Setup and final stage are shared among rounds."""
    means = some(_round_seconds(data.tables.rounds, data.trials))
    chosen = data.summary.rows.drop_duplicates("order")[["order", "chosen_by_default"]]
    methods = data.trials.drop_duplicates("order")[["order", "algorithm", "hyperparameters"]]
    methods = methods.merge(chosen.rename(columns={"chosen_by_default": "chosen"}), on="order")
    parts = means.reset_index().melt("order", list(_PARTS), var_name="part", value_name="seconds")
    rows = with_methods(parts.merge(methods, on="order"))
    y, height = row_axis(rows)
    base = alt.Chart().encode(y=y)
    scale = alt.Scale(domain=list(_PARTS), range=list(COLOURS[: len(_PARTS)]))
    colour = alt.Color("part:N", scale=scale, legend=alt.Legend(title=None, orient="bottom", columns=3))
    x = alt.X("seconds:Q", title="wall-clock seconds per round", axis=alt.Axis(tickCount=6))
    tooltip = ["method:N", "part:N", alt.Tooltip("seconds:Q", format=".3~g")]
    bars = base.mark_bar().encode(x=x, color=colour, order="place:Q", tooltip=tooltip)
    totals = base.mark_text(align="left", dx=4).encode(
        x=alt.X("sum(seconds):Q"), text=alt.Text("sum(seconds):Q", format=".3~g")
    )
    frame = rows.assign(place=rows["part"].map(_PARTS.index))[["method", "row", "part", "place", "seconds"]]
    chart = alt.layer(bars, totals, data=inline(frame)).properties(width=WIDTH, height=height)
    return of_methods(chart, rows, f"{data.experiment}: where the time went, mean over rounds and seeds")


def _round_seconds(rounds: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the mean seconds of a round: a row per order, a column for each of `_PARTS`."""
    columns = [f"seconds_{part}" for part in _PARTS if part != "other"]
    rounds = rounds.merge(trials[[*TRIAL, "order"]], on=TRIAL)
    number = rounds[rounds["stage"] == "round"].groupby("order").size()
    means = rounds.groupby("order")[[*columns, "seconds_total"]].sum().div(number, axis=0).dropna(how="all")
    means["seconds_other"] = (means["seconds_total"] - means[columns].sum(axis=1)).clip(lower=0)
    return means.drop(columns="seconds_total").rename(columns=lambda name: name.removeprefix("seconds_"))
