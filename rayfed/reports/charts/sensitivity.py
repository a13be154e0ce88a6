"""Sensitivity to hyperparameters: the score against each value that a sweep varied."""

import math
from collections.abc import Mapping
from typing import Any

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.captions import RULE_CAPTIONS
from rayfed.reports.charts.chart import WIDTH, Chart, ChartData, inline, lines_of, seeds_words, with_methods
from rayfed.reports.trial_groups import format_value

_MOST_PANELS = 6
_KEYS_WITHOUT_DOT = ("cohort", "cohort_share", "rounds", "batch_norm", "unseen_clients", "unseen_share")


def of_each_key(data: ChartData) -> Chart:
    """Return a panel for each key that varies, or for `data.key`. A line is an algorithm with its other values."""
    rows, rule = data.scores()
    rows = rows[rows["quantity"] == "mean"]
    keys = list(_varying_keys(rows))
    if data.key is not None:
        names = [name for name in keys if data.key in (name, name.removeprefix("algorithm."))]
        if not names:
            near = suggestion(data.key, keys) if keys else "no hyperparameter does"
            raise UsageError(f"key={data.key}: does not vary; {near}")
        keys = names
    if not keys:
        raise UsageError("plot: no hyperparameter varies in these results, so there is no sensitivity to show")
    left_out, keys = keys[_MOST_PANELS:], keys[:_MOST_PANELS]
    columns = min(2, len(keys))
    width = 300 if columns > 1 else WIDTH
    panels = [_panel(rows, key, data).properties(width=width, height=240) for key in keys]
    chart = alt.concat(*panels, columns=columns).resolve_scale(color="independent", strokeDash="independent")
    more = f"; not shown: {', '.join(left_out)}" if left_out else ""
    words = f"{data.average}, {RULE_CAPTIONS[rule].format(criterion=data.criterion)}, {seeds_words(rows['seeds'])}"
    ring = "; ring: chosen by validation" if rows["chosen"].any() else ""
    return Chart(chart, f"{data.experiment}: {words}{ring}{more}")


def _panel(rows: pd.DataFrame, key: str, data: ChartData) -> Any:
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
    """Return the configuration keys with several values for an algorithm, and these algorithms; null is a value."""
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
