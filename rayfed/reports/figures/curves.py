"""Curves over rounds, bytes or the spent privacy budget: the mean over clients, with a band of one sd over seeds."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rayfed.core.errors import UsageError
from rayfed.records.metric_names import is_fraction
from rayfed.reports.captions import average_words
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import (
    COLOURS,
    DASHES,
    legend_below,
    method_label,
    new_figure,
    plain_axes,
    seeds_words,
    shown_methods,
    title,
)
from rayfed.reports.selection import TRIAL
from rayfed.reports.target import gigabytes_sent

_AXES = {"round": "round", "gigabytes": "GB sent so far, by and to all clients", "epsilon": "ε spent so far"}
_LOG_RATIO = 20  # of the bytes that two methods send in all, beyond which their axis is logarithmic


def draw_curves(data: FigureData) -> Figure:
    """Return the curves over rounds. Each line is an algorithm with its hyperparameters."""
    return _draw(data.curves().assign(x=lambda rows: rows["round"]), data, "round")


def draw_against_bytes(data: FigureData) -> Figure:
    """Return the curves over the gigabytes (10⁹ bytes) that were sent until the end of a round, with the setup."""
    rounds = data.tables.rounds.sort_values("round")
    return _draw(_at_rounds(data, rounds.assign(x=gigabytes_sent(rounds))), data, "gigabytes")


def draw_against_epsilon(data: FigureData) -> Figure:
    """Return the curves over the differential privacy spent until the end of a round.

    Raises:
        UsageError: no trial is private.
    """
    rounds = data.tables.rounds
    rounds = rounds.assign(x=rounds["epsilon"].astype(float)).dropna(subset=["x"])
    rows = _at_rounds(data, rounds[rounds["x"] < float("inf")])
    if rows.empty:
        raise UsageError("plot: no trial spent a privacy budget; ε is recorded for private methods such as dp_fedbn")
    return _draw(rows, data, "epsilon")


def _at_rounds(data: FigureData, rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the curves with the mean over trials of `x` at each round."""
    by_trial = rounds[[*TRIAL, "round", "x"]].merge(data.trials[[*TRIAL, "order"]], on=TRIAL)
    x = by_trial.groupby(["order", "round"])["x"].mean().reset_index()
    return data.curves().merge(x, on=["order", "round"])


def _draw(rows: pd.DataFrame, data: FigureData, axis: str) -> Figure:
    means, remark = shown_methods(rows)
    scale = 100 if is_fraction(data.metric) else 1
    figure = new_figure()
    axes = figure.add_subplot()
    labels = []
    for index, (_, line) in enumerate(means.groupby("order")):
        line = line.sort_values(["x", "round"])
        colour, dash = COLOURS[index % len(COLOURS)], DASHES[(index + index // len(COLOURS)) % len(DASHES)]
        middle, sd = line["mean"] * scale, line["sd"].fillna(0.0) * scale
        labels.append(method_label(line.iloc[0]))
        if axis == "gigabytes" and not line["x"].any():
            labels[-1] += " (sends nothing): last round"
            axes.axhline(middle.iloc[-1], color=colour, linestyle=":", linewidth=1.2, label=labels[-1])
            continue
        mark = "o" if len(line) == 1 else None
        axes.plot(line["x"], middle, dash, color=colour, marker=mark, linewidth=1.6, label=labels[-1])
        if (sd > 0).any():
            axes.fill_between(line["x"], middle - sd, middle + sd, color=colour, alpha=0.15, linewidth=0)
    axes.set_xlabel(_AXES[axis])
    axes.set_ylabel(f"{data.split} {data.metric}" + (" (%)" if scale == 100 else ""))
    words = seeds_words(means["seeds"])
    band = words if words.startswith("a single") else f"band: {words}"
    title(axes, f"{data.experiment}: {average_words(data.tables.metrics, data.split, data.metric)}, {band}{remark}")
    plain_axes(axes)
    if axis == "round":
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    elif axis == "gigabytes":
        totals = means.groupby("order")["x"].max()
        if totals.max() > _LOG_RATIO * totals[totals > 0].min():
            axes.set_xscale("log")
    legend_below(figure, labels)
    return figure
