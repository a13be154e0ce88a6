"""Charts of scores: curves over rounds, bytes or privacy, and sensitivity to hyperparameters."""

import math
from collections.abc import Container
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
from rayfed.reports.choice import BY_SEED
from rayfed.reports.groups import format_value, says_which_data
from rayfed.reports.selection import TRIAL
from rayfed.reports.summary import RULE_CAPTIONS
from rayfed.reports.target import gigabytes_sent

_LOG_RATIO = 20  # from this ratio of the largest to the smallest value, an axis is logarithmic
FROM_ANYWHERE = alt.Scale(zero=False)
_MOST_PANELS = 6  # in a chart of sensitivity
_KEYS_WITHOUT_DOT = ("cohort", "cohort_share", "rounds", "batch_norm", "unseen_clients", "unseen_share")


def over_rounds(data: ChartData) -> Chart:
    """Return the curves over rounds. Each line is an algorithm with its hyperparameters."""
    rows = data.curves()
    axis = alt.X("x:Q", title="round", axis=alt.Axis(tickMinStep=1), scale=FROM_ANYWHERE)
    return _curves(rows.assign(x=rows["round"]), data, axis)


def over_bytes(data: ChartData) -> Chart:
    """Return the curves over the gigabytes (10⁹ bytes) sent until the end of a round, the setup included.

    A logarithmic axis leaves out methods that send nothing.
    """
    rounds = data.tables.rounds.sort_values("round")
    rows = _at_rounds(data, rounds.assign(x=gigabytes_sent(rounds)))
    totals = rows.groupby("order")["x"].max()
    least = totals[totals > 0].min()
    title = "GB sent so far"
    scale = alt.Scale(type="linear", zero=False, nice=False)
    if totals.max() > _LOG_RATIO * least:
        scale = alt.Scale(type="log", zero=False, nice=False)
        rows = rows[rows["x"] > 0]
        if totals.eq(0).any():
            title += " (without methods that send nothing)"
    axis = alt.X("x:Q", title=title, scale=scale, axis=alt.Axis(tickCount=6))
    return _curves(rows, data, axis)


def over_clock(data: ChartData) -> Chart:
    """Return the curves over the seconds on the simulated clock at the end of a round, a mean over seeds."""
    rounds = data.tables.rounds.rename(columns={"clock_seconds": "x"})
    rows = _at_rounds(data, rounds.dropna(subset=["x"]))
    if rows.empty:
        raise UsageError("plot: no trial ran on a simulated clock; clock.step_seconds gives one")
    axis = alt.X("x:Q", title="seconds on the simulated clock", scale=FROM_ANYWHERE)
    return _curves(rows, data, axis)


def over_epsilon(data: ChartData) -> Chart:
    """Return the curves over the differential privacy spent until the end of a round."""
    rounds = data.tables.rounds
    spent = rounds.assign(x=rounds["epsilon"].astype(float)).dropna(subset=["x"])
    rows = _at_rounds(data, spent[spent["x"] < math.inf])
    if rows.empty:
        raise UsageError("plot: no trial spent a privacy budget; ε is recorded for private methods such as dp_fedbn")
    axis = alt.X("x:Q", title="ε spent so far", scale=FROM_ANYWHERE)
    return _curves(rows, data, axis)


def _at_rounds(data: ChartData, rounds: pd.DataFrame) -> pd.DataFrame:
    """Return the curves with the mean over trials of `x` at each round."""
    by_trial = rounds[[*TRIAL, "round", "x"]].merge(data.trials[[*TRIAL, "order"]], on=TRIAL)
    x = by_trial.groupby(["order", "round"])["x"].mean()
    return data.curves().merge(x.reset_index(), on=["order", "round"])


def _curves(rows: pd.DataFrame, data: ChartData, x: alt.X) -> Chart:
    rows = with_bounds(with_methods(rows), data)
    shown, _ = drawn_methods(rows, MOST_LINES)
    frame = rows[["method", "x", "y", "low", "high", "round", "seeds"]]
    colour, dash = lines_of(rows, "method", first=shown)
    tooltip = ["method:N", "round:Q", *score_tooltip(data)]
    base = alt.Chart().encode(x=x, color=colour)
    low = alt.Y("low:Q", scale=FROM_ANYWHERE, title=data.score_title)
    band = base.mark_area(opacity=0.15).encode(y=low, y2="high:Q")
    line = base.mark_line().encode(y="y:Q", strokeDash=dash, order="round:Q")
    points = base.mark_point(filled=True, size=20, opacity=1).encode(y="y:Q", tooltip=tooltip)
    chart = alt.layer(band, line, points, data=inline(frame)).properties(width=WIDTH, height=300)
    spread = seeds_words(rows.loc[rows["method"].isin(shown), "seeds"])
    if not spread.startswith("a single"):
        spread = f"band: {spread}"
    return of_methods(chart, rows, f"{data.experiment}: {data.average}, {spread}", MOST_LINES)


def with_bounds(rows: pd.DataFrame, data: ChartData) -> pd.DataFrame:
    """Return `rows` with the mean as `y`, and with `low` and `high` one standard deviation below and above it."""
    y = rows["mean"] * data.scale
    sd = rows["sd"].fillna(0.0) * data.scale
    return rows.assign(y=y, low=y - sd, high=y + sd)


def score_tooltip(data: ChartData) -> list[Any]:
    return [alt.Tooltip("y:Q", title=data.score_title, format=".4~g"), "low:Q", "high:Q", "seeds:Q"]


def of_each_key(data: ChartData) -> Chart:
    """Return a panel for each key that varies. A line is an algorithm with its other values."""
    rows, rule = data.scores()
    rows = rows[(rows["quantity"] == "mean") & (rows["hyperparameters"] != BY_SEED)]
    keys = list(_varying_keys(rows))
    if not keys:
        raise UsageError("plot: no hyperparameter varies in these results, so there is no sensitivity to show")
    if any(says_which_data(key) for key in keys):
        rows = rows.assign(chosen=False)  # validation does not choose among data
    drawn = keys[:_MOST_PANELS]
    columns = min(2, len(drawn))
    width = WIDTH
    if columns > 1:
        width = 300
    panels = [_key_panel(rows, key, data).properties(width=width, height=240) for key in drawn]
    chart = alt.concat(*panels, columns=columns).resolve_scale(color="independent", strokeDash="independent")
    picked = RULE_CAPTIONS[rule].format(criterion=data.criterion)
    caption = f"{data.experiment}: {data.average}, {picked}, {seeds_words(rows['seeds'])}"
    if rows["chosen"].any():
        caption += "; ring: chosen by validation"
    if len(keys) > len(drawn):
        caption += f"; not shown: {', '.join(keys[_MOST_PANELS:])}"
    return Chart(chart, caption)


def _key_panel(rows: pd.DataFrame, key: str, data: ChartData) -> Any:
    rows = rows[rows["algorithm"].isin(_varying_keys(rows)[key])]
    rows = rows.assign(x=value_texts(rows, key), line=line_labels(rows, {key}))
    rows = with_bounds(with_methods(rows), data)
    frame = rows[["method", "line", "x", "y", "low", "high", "seeds", "chosen"]]
    colour, dash = lines_of(frame, "line")
    y = alt.Y("y:Q", scale=FROM_ANYWHERE, title=data.score_title)
    low = alt.Y("low:Q", title=data.score_title)
    base = alt.Chart().encode(x=_key_axis(key, frame["x"]), color=colour, y=y)
    bars = base.mark_rule().encode(y=low, y2="high:Q")
    lines = base.mark_line().encode(strokeDash=dash)
    points = base.mark_point(filled=True, size=30, opacity=1).encode(tooltip=["method:N", *score_tooltip(data)])
    rings = base.transform_filter("datum.chosen").mark_point(size=140, opacity=1)
    return alt.layer(bars, lines, points, rings, data=inline(frame))


def _key_axis(key: str, texts: pd.Series) -> alt.X:
    """Return the axis of a key with the values `texts`: logarithmic if they are positive numbers far apart."""
    numbers = {text: _number(text) for text in texts}
    order = sorted(numbers, key=lambda text: (math.isnan(numbers[text]), numbers[text], text))  # numbers come first
    values = [numbers[text] for text in order]
    all_differ = len(set(values)) == len(values)
    if all_differ and values[0] > 0 and values[-1] / values[0] >= _LOG_RATIO:  # never with NaN, which is no number
        return alt.X("x:Q", title=key, scale=alt.Scale(type="log"), axis=alt.Axis(values=values))
    return alt.X("x:O", title=key, sort=order, axis=alt.Axis(labelAngle=0))


def _varying_keys(rows: pd.DataFrame) -> dict[str, set[str]]:
    """Return the keys that have several values for an algorithm, with these algorithms; null counts as a value."""
    varying = {}
    for key in rows.columns:
        if "." not in key and key not in _KEYS_WITHOUT_DOT:
            continue
        counts = value_texts(rows, key).groupby(rows["algorithm"]).nunique()
        algorithms = set(counts.index[counts > 1])
        if algorithms:
            varying[key] = algorithms
    return varying


def value_texts(rows: pd.DataFrame, key: str) -> pd.Series:
    """Return the values of a configuration key as text, as tables show them."""
    return rows[key].map(lambda value: format_value(value)).astype(str)


def line_labels(rows: pd.DataFrame, left_out: Container[str]) -> list[str]:
    """Return the algorithm of each row and its values of the keys that vary for it, without the keys `left_out`."""
    varying = _varying_keys(rows)
    labels = []
    for row in rows.to_dict("records"):
        pairs = []
        for other, algorithms in varying.items():
            if other not in left_out and row["algorithm"] in algorithms:
                pairs.append(f"{other.removeprefix('algorithm.')}={format_value(row[other])}")
        labels.append(" ".join(filter(None, [str(row["algorithm"]), ", ".join(pairs)])))
    return labels


def _number(text: str) -> float:
    """Return `text` as a number, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
