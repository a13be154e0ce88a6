"""Where the time went: wall-clock seconds per round by part, for each method."""

import numpy as np
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.reports.chart_data import ROUND_PARTS, round_seconds
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import (
    COLOURS,
    legend_below,
    method_label,
    new_figure,
    plain_axes,
    row_labels,
    shown_methods,
    title,
)
from rayfed.reports.selection import TRIAL


def draw_time(data: FigureData) -> Figure:
    """Return a bar per method: the mean seconds of a round, by part; setup and final stage are shared among rounds.

    Raises:
        UsageError: no round was recorded.
    """
    rounds = data.tables.rounds.merge(
        data.trials[[*TRIAL, "order", "algorithm", "hyperparameters"]], on=TRIAL, suffixes=("", "_")
    )
    if rounds.empty:
        raise UsageError("plot: no round was recorded")
    rounds, remark = shown_methods(rounds.assign(chosen=False), 16)
    means = round_seconds(data.tables.rounds, data.trials)
    first = rounds.drop_duplicates("order").set_index("order")
    means = means[means.index.isin(first.index)]
    labels, height = row_labels(method_label(first.loc[order]) for order in means.index)
    figure = new_figure(7.2, 1.6 + height * len(labels))
    axes = figure.add_subplot()
    left = np.zeros(len(labels))
    for index, part in enumerate(ROUND_PARTS):
        widths = means[part].to_numpy()
        axes.barh(range(len(labels)), widths, left=left, color=COLOURS[index], label=part, height=0.7)
        left += widths
    for line, total in enumerate(left):
        axes.text(total, line, f" {total:.3g} s", va="center", fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("wall-clock seconds per round")
    axes.margins(x=0.12)
    plain_axes(axes)
    title(axes, f"{data.experiment}: where the time went, mean over rounds and seeds{remark}")
    legend_below(figure, ROUND_PARTS)
    return figure
