"""Where the time went: wall-clock seconds per round by part, for each method."""

import numpy as np
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.core.records import SECONDS
from rayfed.results.figures.data import FigureData
from rayfed.results.figures.style import (
    COLOURS,
    legend_below,
    method_label,
    new_figure,
    plain_axes,
    shown_methods,
    title,
)
from rayfed.results.selection import TRIAL

PARTS = tuple(part for part in SECONDS if part != "total")


def draw_time(data: FigureData) -> Figure:
    """Return a bar per method: the mean seconds of a round, by part; setup and final stage are shared among rounds.

    Raises:
        UsageError: no round was recorded.
    """
    columns = [f"seconds_{part}" for part in (*PARTS, "total")]
    rounds = data.tables.rounds.merge(
        data.trials[[*TRIAL, "order", "algorithm", "hyperparameters"]], on=TRIAL, suffixes=("", "_")
    )
    if rounds.empty:
        raise UsageError("plot: no round was recorded")
    rounds, remark = shown_methods(rounds.assign(chosen=False), 16)
    number = rounds[rounds["stage"] == "round"].groupby("order").size()
    means = rounds.groupby("order")[columns].sum().div(number, axis=0)
    means["other"] = (means["seconds_total"] - means[columns[:-1]].sum(axis=1)).clip(lower=0)
    labels = [method_label(group.iloc[0]) for _, group in rounds.groupby("order")]
    figure = new_figure(7.2, 1.6 + 0.36 * len(labels))
    axes = figure.add_subplot()
    left = np.zeros(len(labels))
    names = (*PARTS, "other")
    for index, part in enumerate(names):
        widths = means[f"seconds_{part}" if part != "other" else "other"].to_numpy()
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
    legend_below(figure, names)
    return figure
