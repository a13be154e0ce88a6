"""Where the time went: wall-clock seconds per round by part, for each method."""

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.records import SECONDS
from rayfed.reports.charts.chart import COLOURS, WIDTH, Chart, ChartData, inline, of_methods, row_axis, with_methods
from rayfed.reports.selection import TRIAL

_PARTS = (*(part for part in SECONDS if part != "total"), "other")
"""The parts of a round's wall-clock time; `other` is the total less the measured parts."""


def seconds(data: ChartData) -> Chart:
    """Return a bar per method: the mean seconds of a round by part. Setup and final stage are shared among rounds."""
    means = _round_seconds(data.tables.rounds, data.trials)
    if means.empty:
        raise UsageError("plot: no round was recorded")
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
