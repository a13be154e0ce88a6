"""Partitions: the number of training examples by client and class."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.records.files import read_holdings
from rayfed.records.storage import Storage
from rayfed.reports.charts.chart import COLOURS, WIDTH, Chart, ChartData, inline

_MOST_PANELS = 6
_MOST_BUBBLES = 50  # of clients or of classes; with more, the chart is a heat map


class _Partition(NamedTuple):
    """Who holds how many examples for training and validation.

    Attributes:
        title: its hash, and the seed with which it was drawn if it is random.
        clients: the numbers of the clients.
        domains: the domain of each client.
        counts: int64 [clients, classes].
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
    if "partition_hash" not in trials:
        return []
    partitions = []
    recorded = trials.dropna(subset="partition_hash").sort_values("seed")
    for digest, group in recorded.groupby("partition_hash", sort=False):
        if (holdings := read_holdings(home, str(digest))) is None:
            continue
        seeds = group["partition_seed"].head(1).dropna() if "partition_seed" in group else []
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

    Args:
        clients: The numbers of the clients.
        domains: The domain of each client.
        counts: int64 [clients, classes], the numbers of examples.
        width: The width of the panel.
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
