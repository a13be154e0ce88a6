"""Where the time went: wall-clock seconds per round by part, for each method."""

import altair as alt

from rayfed.core.errors import UsageError
from rayfed.reports.chart_data import ROUND_PARTS, round_seconds
from rayfed.reports.charts.chart import Chart, ChartData
from rayfed.reports.charts.style import (
    COLOURS,
    MOST_ROWS,
    WIDTH,
    drawn_methods,
    inline,
    of_methods,
    row_axis,
    with_methods,
)


def seconds(data: ChartData) -> Chart:
    """Return a bar per method: the mean seconds of a round, by part; setup and final stage are shared among rounds.

    Raises:
        UsageError: no round was recorded.
    """
    means = round_seconds(data.tables.rounds, data.trials)
    if means.empty:
        raise UsageError("plot: no round was recorded")
    chosen = data.summary.rows.drop_duplicates("order")[["order", "chosen_by_default"]]
    methods = data.trials.drop_duplicates("order")[["order", "algorithm", "hyperparameters"]]
    methods = methods.merge(chosen.rename(columns={"chosen_by_default": "chosen"}), on="order")
    parts = means.reset_index().melt("order", list(ROUND_PARTS), var_name="part", value_name="seconds")
    rows = with_methods(parts.merge(methods, on="order"))
    shown, remark = drawn_methods(rows, MOST_ROWS)
    y, height = row_axis(rows)
    base = alt.Chart().encode(y=y)
    colour = alt.Color(
        "part:N",
        scale=alt.Scale(domain=list(ROUND_PARTS), range=list(COLOURS[: len(ROUND_PARTS)])),
        legend=alt.Legend(title=None, orient="bottom", columns=3),
    )
    x = alt.X("seconds:Q", title="wall-clock seconds per round", axis=alt.Axis(tickCount=6))
    bars = base.mark_bar().encode(
        x=x, color=colour, order="place:Q", tooltip=["method:N", "part:N", alt.Tooltip("seconds:Q", format=".3~g")]
    )
    totals = base.mark_text(align="left", dx=4).encode(
        x=alt.X("sum(seconds):Q"), text=alt.Text("sum(seconds):Q", format=".3~g")
    )
    frame = rows.assign(place=rows["part"].map(ROUND_PARTS.index))[["method", "row", "part", "place", "seconds"]]
    chart = alt.layer(bars, totals, data=inline(frame)).properties(width=WIDTH, height=height)
    caption = f"{data.experiment}: where the time went, mean over rounds and seeds"
    return Chart(of_methods(chart, rows, shown), caption, remark)
