"""Curves over rounds, bytes or the spent privacy budget: the mean over clients, with a band of one sd over seeds."""

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.reports.charts.chart import (
    MOST_LINES,
    WIDTH,
    Chart,
    ChartData,
    drawn_methods,
    inline,
    lines_of,
    of_methods,
    seeds_words,
    with_methods,
)
from rayfed.reports.selection import TRIAL
from rayfed.reports.target import gigabytes_sent

_LOG_RATIO = 20  # of the bytes that two methods send in all, beyond which their axis is logarithmic


def over_rounds(data: ChartData) -> Chart:
    """Return the curves over rounds. Each line is an algorithm with its hyperparameters."""
    rows = data.curves().assign(x=lambda rows: rows["round"])
    return _curves(rows, data, alt.X("x:Q", title="round", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=False)))


def over_bytes(data: ChartData) -> Chart:
    """Return the curves over the gigabytes (10⁹ bytes) that were sent until the end of a round, with the setup.

    A method that sends nothing is a dotted line at the height of its last round.
    """
    rounds = data.tables.rounds.sort_values("round")
    rows = _at_rounds(data, rounds.assign(x=gigabytes_sent(rounds)))
    totals = rows.groupby("order")["x"].max()
    silent = rows["order"].map(totals).eq(0)
    is_log = bool(totals.max() > _LOG_RATIO * totals[totals > 0].min())
    rows = pd.concat([rows[~silent & (rows["x"].gt(0) | (not is_log))], _across(rows[silent], rows[~silent], is_log)])
    scale = alt.Scale(type="log" if is_log else "linear", zero=False, nice=False)
    axis = alt.Axis(tickCount=6)
    title = "GB sent so far" + (" (dotted: sends nothing)" if silent.any() else "")
    return _curves(rows, data, alt.X("x:Q", title=title, scale=scale, axis=axis))


def over_epsilon(data: ChartData) -> Chart:
    """Return the curves over the differential privacy spent until the end of a round."""
    rounds = data.tables.rounds
    rounds = rounds.assign(x=rounds["epsilon"].astype(float)).dropna(subset=["x"])
    rows = _at_rounds(data, rounds[rounds["x"] < float("inf")])
    if rows.empty:
        raise UsageError("plot: no trial spent a privacy budget; ε is recorded for private methods such as dp_fedbn")
    return _curves(rows, data, alt.X("x:Q", title="ε spent so far", scale=alt.Scale(zero=False)))


def _at_rounds(data: ChartData, rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the curves with the mean over trials of `x` at each round."""
    by_trial = rounds[[*TRIAL, "round", "x"]].merge(data.trials[[*TRIAL, "order"]], on=TRIAL)
    x = by_trial.groupby(["order", "round"])["x"].mean().reset_index()
    return data.curves().merge(x, on=["order", "round"])


def _across(silent: pd.DataFrame, others: pd.DataFrame, is_log: bool) -> pd.DataFrame:
    """Return the last round of methods that send nothing at both ends of the axis."""
    last = silent.sort_values("round").drop_duplicates("order", keep="last").assign(sd=0.0, silent=True)
    if others.empty:
        return last
    left = others.loc[others["x"] > 0, "x"].min() if is_log else 0.0
    return pd.concat([last.assign(x=x) for x in (left, others["x"].max())])


def _curves(rows: pd.DataFrame, data: ChartData, x: alt.X) -> Chart:
    if rows.empty:
        raise UsageError("plot: no evaluated round has a place on this axis")
    rows = with_methods(rows)
    rows["silent"] = rows["silent"].eq(True) if "silent" in rows else False
    y, sd = rows["mean"] * data.scale, rows["sd"].fillna(0.0) * data.scale
    frame = rows.assign(y=y, low=y - sd, high=y + sd)[["method", "x", "y", "low", "high", "round", "seeds", "silent"]]
    shown, _ = drawn_methods(rows, MOST_LINES)
    colour, dash = lines_of(rows, "method", first=shown)
    title = data.score_title
    tooltip = ["method:N", "round:Q", alt.Tooltip("y:Q", title=title, format=".4~g"), "low:Q", "high:Q", "seeds:Q"]
    base = alt.Chart().encode(x=x, color=colour)
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False), title=title), y2="high:Q")
    line = base.transform_filter("!datum.silent").mark_line().encode(y="y:Q", strokeDash=dash, order="round:Q")
    flat = base.transform_filter("datum.silent").mark_line(strokeDash=[2, 4]).encode(y="y:Q")
    points = base.mark_point(filled=True, size=20, opacity=1).encode(y="y:Q", tooltip=tooltip)
    layers = [band, line, *([flat] if rows["silent"].any() else []), points]
    chart = alt.layer(*layers, data=inline(frame)).properties(width=WIDTH, height=300)
    words = seeds_words(rows.loc[rows["method"].isin(shown), "seeds"])
    spread = words if words.startswith("a single") else f"band: {words}"
    return of_methods(chart, rows, f"{data.experiment}: {data.average}, {spread}", MOST_LINES)
