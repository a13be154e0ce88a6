"""A heat map of the clients: a row per method, a column per client, at the round that the rule picks."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from rayfed.core.errors import UsageError
from rayfed.core.records import SERVER
from rayfed.results.captions import RULE_CAPTIONS
from rayfed.results.figures.data import FigureData
from rayfed.results.figures.style import method_label, new_figure, shown_methods
from rayfed.results.metric_names import is_fraction
from rayfed.results.pairs import paired_scores
from rayfed.results.selection import CLIENT

_MOST_NUMBERS = 25  # of clients whose values are printed in the cells
_MOST_METHODS = 16


def draw_clients(data: FigureData) -> Figure:
    """Return the heat map of means over seeds. Clients are sorted by domain, then by number.

    Raises:
        UsageError: the values belong to the server and not to clients.
    """
    rows, rule = data.scores()
    scores = paired_scores(
        data.tables,
        metric=data.metric,
        point=data.point,
        split=data.split,
        rule=rule,
        summary=data.summary,
    )
    values = scores.values[scores.values["quantity"].str.startswith(CLIENT)]
    if values.empty:
        raise UsageError(f"plot: no client has {data.split} {data.metric}; these values are the server's")
    shown, remark = shown_methods(rows[rows["quantity"] == "mean"], _MOST_METHODS)
    labels = {int(row["order"]): method_label(row) for _, row in shown.iterrows()}
    values = values[values["order"].isin(labels)].assign(
        client=lambda frame: frame["quantity"].str.removeprefix(CLIENT).astype(int)
    )
    table = values.pivot_table(index="order", columns="client", values="value", aggfunc="mean").reindex(list(labels))
    domains = _domains(data.tables.metrics)
    ordered = sorted(table.columns, key=lambda client: (domains.get(client, ""), client))
    table = table[ordered] * (100 if is_fraction(data.metric) else 1)

    width = min(14.0, max(6.0, 2.5 + 0.42 * len(ordered)))
    figure = new_figure(width, 1.6 + 0.36 * len(table) + (0.5 if len(set(domains.values())) > 1 else 0))
    axes = figure.add_subplot()
    better = bool(rows["higher_is_better"].iloc[0])
    image = axes.imshow(table.to_numpy(), aspect="auto", cmap="viridis" if better else "viridis_r")
    unit = " (%)" if is_fraction(data.metric) else ""
    figure.colorbar(image, ax=axes, label=f"{data.split} {data.metric}{unit}")
    axes.set_yticks(range(len(table)), [labels[order] for order in table.index], fontsize=8)
    if len(ordered) <= _MOST_NUMBERS:
        axes.set_xticks(range(len(ordered)), [_client_label(client, domains) for client in ordered], fontsize=7)
        _print_values(axes, table.to_numpy(), image)
    else:
        axes.set_xlabel(f"{len(ordered)} clients, sorted by domain and number")
        axes.set_xticks([])
    borders = [i for i in range(1, len(ordered)) if domains.get(ordered[i]) != domains.get(ordered[i - 1])]
    if len(borders) < len(ordered) - 1:
        for border in borders:
            axes.axvline(border - 0.5, color="white", linewidth=1.5)
    seeds = sorted(set(shown["seeds"].astype(int)))
    over = "a single seed" if seeds == [1] else f"mean over {seeds[-1]} seeds"
    if scores.trials.groupby("order")["partition_hash"].nunique().max() > 1:
        over += " with other partitions, so a client holds other data in each"
    caption = RULE_CAPTIONS[rule].split(":")[0] if rule in ("oracle", "best5") else scores.caption
    axes.set_title(f"{data.experiment}: each client, {caption}; {over}{remark}", fontsize=8, loc="left", wrap=True)
    return figure


def _domains(metrics: pd.DataFrame) -> dict[int, str]:
    rows = metrics[metrics["client"] != SERVER].drop_duplicates("client")
    return {int(client): str(domain or "") for client, domain in zip(rows["client"], rows["domain"], strict=True)}


def _client_label(client: int, domains: dict[int, str]) -> str:
    several = len(set(domains.values())) > 1
    return f"{client}\n{domains[client][:9]}" if several and domains.get(client) else str(client)


def _print_values(axes: Axes, table: np.ndarray, image: AxesImage) -> None:
    """Print each value in its cell, black on light colours and white on dark ones."""
    for (line, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
            axes.text(column, line, text, ha="center", va="center", fontsize=7, color=colour)
