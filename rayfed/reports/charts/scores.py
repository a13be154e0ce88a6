"""Charts of scores: curves over rounds, bytes or privacy, and sensitivity to hyperparameters."""

import math
from collections.abc import Mapping
from typing import Any

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
from rayfed.reports.selection import TRIAL, format_value
from rayfed.reports.summary import RULE_CAPTIONS
from rayfed.reports.target import gigabytes_sent

_LOG_RATIO = 20  # beyond this ratio of the bytes that two methods send, the axis is logarithmic
_MOST_PANELS = 6  # in a chart of sensitivity
_KEYS_WITHOUT_DOT = ("cohort", "cohort_share", "rounds", "batch_norm", "unseen_clients", "unseen_share")


def over_rounds(data: ChartData) -> Chart:
    """Return the curves over rounds. Each line is an algorithm with its hyperparameters."""
    rows = data.curves().assign(x=lambda rows: rows["round"])
    return _curves(rows, data, alt.X("x:Q", title="round", axis=alt.Axis(tickMinStep=1), scale=alt.Scale(zero=False)))


def over_bytes(data: ChartData) -> Chart:
    """Return the curves over the gigabytes (10⁹ bytes) sent until the end of a round, the setup included.

    A logarithmic axis leaves out methods that send nothing.
    """
    rounds = data.tables.rounds.sort_values("round")
    rows = _at_rounds(data, rounds.assign(x=gigabytes_sent(rounds)))
    totals = rows.groupby("order")["x"].max()
    is_log = bool(totals.max() > _LOG_RATIO * totals[totals > 0].min())
    scale = alt.Scale(type="log" if is_log else "linear", zero=False, nice=False)
    title = "GB sent so far" + " (without methods that send nothing)" * bool(is_log and totals.eq(0).any())
    axis = alt.X("x:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
    return _curves(rows[rows["x"].gt(0) | (not is_log)], data, axis)


def over_clock(data: ChartData) -> Chart:
    """Return the curves over the seconds on the simulated clock at the end of a round, a mean over seeds."""
    rows = _at_rounds(data, data.tables.rounds.rename(columns={"clock_seconds": "x"}).dropna(subset=["x"]))
    if rows.empty:
        raise UsageError("plot: no trial ran on a simulated clock; clock.step_seconds gives one")
    return _curves(rows, data, alt.X("x:Q", title="seconds on the simulated clock", scale=alt.Scale(zero=False)))


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


def _curves(rows: pd.DataFrame, data: ChartData, x: alt.X) -> Chart:
    rows = with_methods(rows)
    y, sd = rows["mean"] * data.scale, rows["sd"].fillna(0.0) * data.scale
    frame = rows.assign(y=y, low=y - sd, high=y + sd)[["method", "x", "y", "low", "high", "round", "seeds"]]
    shown, _ = drawn_methods(rows, MOST_LINES)
    colour, dash = lines_of(rows, "method", first=shown)
    title = data.score_title
    tooltip = ["method:N", "round:Q", alt.Tooltip("y:Q", title=title, format=".4~g"), "low:Q", "high:Q", "seeds:Q"]
    base = alt.Chart().encode(x=x, color=colour)
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=alt.Scale(zero=False), title=title), y2="high:Q")
    line = base.mark_line().encode(y="y:Q", strokeDash=dash, order="round:Q")
    points = base.mark_point(filled=True, size=20, opacity=1).encode(y="y:Q", tooltip=tooltip)
    chart = alt.layer(band, line, points, data=inline(frame)).properties(width=WIDTH, height=300)
    words = seeds_words(rows.loc[rows["method"].isin(shown), "seeds"])
    spread = words if words.startswith("a single") else f"band: {words}"
    return of_methods(chart, rows, f"{data.experiment}: {data.average}, {spread}", MOST_LINES)


def of_each_key(data: ChartData) -> Chart:
    """Return a panel for each key that varies. A line is an algorithm with its other values."""
    rows, rule = data.scores()
    rows = rows[rows["quantity"] == "mean"]
    keys = list(_varying_keys(rows))
    if not keys:
        raise UsageError("plot: no hyperparameter varies in these results, so there is no sensitivity to show")
    left_out, keys = keys[_MOST_PANELS:], keys[:_MOST_PANELS]
    columns = min(2, len(keys))
    width = 300 if columns > 1 else WIDTH
    panels = [_key_panel(rows, key, data).properties(width=width, height=240) for key in keys]
    chart = alt.concat(*panels, columns=columns).resolve_scale(color="independent", strokeDash="independent")
    more = f"; not shown: {', '.join(left_out)}" if left_out else ""
    words = f"{data.average}, {RULE_CAPTIONS[rule].format(criterion=data.criterion)}, {seeds_words(rows['seeds'])}"
    ring = "; ring: chosen by validation" if rows["chosen"].any() else ""
    return Chart(chart, f"{data.experiment}: {words}{ring}{more}")


def _key_panel(rows: pd.DataFrame, key: str, data: ChartData) -> Any:
    rows = rows[rows["algorithm"].isin(_varying_keys(rows)[key])]
    numbers = {text: _number(text) for text in _texts(rows, key)}
    values = sorted(numbers, key=lambda text: (math.isnan(numbers[text]), numbers[text], text))  # numbers come first
    span = numbers[values[0]], numbers[values[-1]]  # NaN where a value is no number
    is_log = span[0] > 0 and span[1] / span[0] >= 20 and len(set(numbers.values())) == len(numbers)
    others = {other: algorithms for other, algorithms in _varying_keys(rows).items() if other != key}
    rows = with_methods(rows)
    y, sd = rows["mean"] * data.scale, rows["sd"].fillna(0.0) * data.scale
    lines = [_line_label(row, others) for row in rows.to_dict("records")]
    frame = rows.assign(x=_texts(rows, key), y=y, low=y - sd, high=y + sd, line=lines)
    frame = frame[["method", "line", "x", "y", "low", "high", "seeds", "chosen"]]
    if is_log:
        x = alt.X("x:Q", title=key, scale=alt.Scale(type="log"), axis=alt.Axis(values=[numbers[v] for v in values]))
    else:
        x = alt.X("x:O", title=key, sort=values, axis=alt.Axis(labelAngle=0))
    colour, dash = lines_of(frame, "line")
    tooltip = ["method:N", alt.Tooltip("y:Q", title=data.score_title, format=".4~g"), "low:Q", "high:Q", "seeds:Q"]
    base = alt.Chart().encode(x=x, color=colour, y=alt.Y("y:Q", scale=alt.Scale(zero=False), title=data.score_title))
    bars = base.mark_rule().encode(y=alt.Y("low:Q", title=data.score_title), y2="high:Q")
    rings = base.transform_filter("datum.chosen").mark_point(size=140, opacity=1)
    points = base.mark_point(filled=True, size=30, opacity=1).encode(tooltip=tooltip)
    return alt.layer(bars, base.mark_line().encode(strokeDash=dash), points, rings, data=inline(frame))


def _varying_keys(rows: pd.DataFrame) -> dict[str, set[str]]:
    """Return the keys that have several values for an algorithm, with these algorithms; null counts as a value."""
    varying = {}
    for key in (name for name in rows.columns if "." in name or name in _KEYS_WITHOUT_DOT):
        counts = _texts(rows, key).groupby(rows["algorithm"]).nunique()
        if algorithms := set(counts.index[counts > 1]):
            varying[key] = algorithms
    return varying


def _texts(rows: pd.DataFrame, key: str) -> pd.Series:
    """Return the values of a configuration key as text, as tables show them."""
    return rows[key].map(lambda value: format_value(value)).astype(str)


def _line_label(row: Mapping[str, object], others: Mapping[str, set[str]]) -> str:
    """Return the algorithm of a row and its values of the keys in `others` that vary for the algorithm."""
    pairs = [
        f"{key.removeprefix('algorithm.')}={format_value(row[key])}"
        for key, algorithms in others.items()
        if row["algorithm"] in algorithms
    ]
    return " ".join(filter(None, [str(row["algorithm"]), ", ".join(pairs)]))


def _number(text: str) -> float:
    """Return `text` as a number, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
