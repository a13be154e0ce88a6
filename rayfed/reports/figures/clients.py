"""A heat map of the clients: a row per method, a column per client, at the round that the rule picks."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from rayfed.core.errors import UsageError
from rayfed.records.metric_names import is_fraction
from rayfed.reports.captions import RULE_CAPTIONS
from rayfed.reports.chart_data import client_scores, most_partitions
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import method_label, new_figure, row_labels, shown_methods
from rayfed.reports.row_filter import filter_rows

_MOST_NUMBERS = 25  # of clients whose values are printed in the cells
_MOST_METHODS = 16


def draw_clients(data: FigureData) -> Figure:
    """Return the heat map of means over seeds. Clients are sorted by domain, then by number.

    Raises:
        UsageError: the values belong to the server and not to clients.
    """
    rows, rule = data.scores()
    values = client_scores(data.tables)
    values = values[(values["metric"] == data.metric) & (values["split"] == data.split)]
    if not values.empty:
        values = filter_rows(values, data.tables, metric=data.metric, point=data.point, split=data.split)
        values = values[values["rule"] == rule]
    if values.empty:
        raise UsageError(f"plot: no client has {data.split} {data.metric}; these values are the server's")
    shown, remark = shown_methods(rows[rows["quantity"] == "mean"], _MOST_METHODS)
    labels = {int(row["order"]): method_label(row) for _, row in shown.iterrows()}
    values = values[values["order"].isin(labels)]
    table = values.pivot_table(index="order", columns=["domain", "client"], values="value").reindex(list(labels))
    table = table[sorted(table.columns)]
    holders = [(str(domain), int(client)) for domain, client in table.columns]
    domains = [domain for domain, _ in holders]
    table = table * (100 if is_fraction(data.metric) else 1)

    width = min(14.0, max(6.0, 2.5 + 0.42 * len(holders)))
    names, height = row_labels(labels[order] for order in table.index)
    figure = new_figure(width, 1.6 + height * len(table) + (0.5 if len(set(domains)) > 1 else 0))
    axes = figure.add_subplot()
    better = bool(rows["higher_is_better"].iloc[0])
    image = axes.imshow(table.to_numpy(), aspect="auto", cmap="viridis" if better else "viridis_r")
    unit = " (%)" if is_fraction(data.metric) else ""
    figure.colorbar(image, ax=axes, label=f"{data.split} {data.metric}{unit}")
    axes.set_yticks(range(len(table)), names, fontsize=8)
    if len(holders) <= _MOST_NUMBERS:
        axes.set_xticks(
            range(len(holders)),
            [_client_label(*holder, several=len(set(domains)) > 1) for holder in holders],
            fontsize=7,
        )
        _print_values(axes, table.to_numpy(), image)
    else:
        axes.set_xlabel(f"{len(holders)} clients, sorted by domain and number")
        axes.set_xticks([])
    borders = [i for i in range(1, len(domains)) if domains[i] != domains[i - 1]]
    if len(borders) < len(holders) - 1:
        for border in borders:
            axes.axvline(border - 0.5, color="white", linewidth=1.5)
    seeds = sorted(set(values["seeds"]))  # fewer of a client that was set aside at some
    counted = f"{seeds[0]} to {seeds[-1]}" if len(seeds) > 1 else f"{seeds[-1]}"
    over = "a single seed" if seeds == [1] else f"mean over {counted} seeds"
    if most_partitions(data.tables) > 1:
        over += " with other partitions, so a client holds other data in each"
    caption = RULE_CAPTIONS[rule].split(":")[0].format(criterion=data.criterion)
    axes.set_title(f"{data.experiment}: each client, {caption}; {over}{remark}", fontsize=8, loc="left", wrap=True)
    return figure


def _client_label(domain: str, client: int, *, several: bool) -> str:
    return f"{client}\n{domain[:9]}" if several and domain else str(client)


def _print_values(axes: Axes, table: np.ndarray, image: AxesImage) -> None:
    """Print each value in its cell, black on light colours and white on dark ones."""
    for (line, column), value in np.ndenumerate(table):
        if np.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            colour = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
            text = f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"
            axes.text(column, line, text, ha="center", va="center", fontsize=7, color=colour)
