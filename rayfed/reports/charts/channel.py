"""Charts of what travels: scores by the privacy that all rounds spent, by what clients sent, and by attack and rule."""

import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.reports.charts.chart import (
    WIDTH,
    Chart,
    ChartData,
    colours_with,
    inline,
    lines_of,
    seeds_words,
    with_methods,
)
from rayfed.reports.charts.scores import FROM_ANYWHERE, line_labels, score_tooltip, value_texts, with_bounds
from rayfed.reports.selection import TRIAL
from rayfed.reports.summary import RULE_CAPTIONS

_OF_BUDGET = {"privacy.name", "privacy.epsilon", "privacy.sigma", "privacy.delta", "algorithm.epsilon"}
"""The keys that set how much privacy a trial spends."""
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down")
_MOST_PANELS = 6  # of attacks and rules


def over_budget(data: ChartData) -> Chart:
    """Return the score against the ε of all rounds together. A line is a method; without ε, it is a level.

    Raises:
        UsageError: No trial spent a privacy budget.
    """
    rows, rule = _means(data)
    rounds = data.tables.rounds.assign(spent=data.tables.rounds["epsilon"].astype(float))
    spent = rounds.groupby(TRIAL)["spent"].max()
    rows = rows.assign(x=rows["order"].map(_by_group(data, spent)), line=line_labels(rows, _OF_BUDGET))
    is_private = rows["x"] < math.inf
    if not is_private.any():
        raise UsageError("plot: no trial spent a privacy budget; privacy.epsilon or privacy.sigma gives one")
    frame = rows[["line", "method", "x", "y", "low", "high", "seeds"]].assign(private=is_private)
    colour, dash = lines_of(frame, "line")
    y = alt.Y("y:Q", scale=FROM_ANYWHERE, title=data.score_title)
    low = alt.Y("low:Q", title=data.score_title)
    x = alt.X("x:Q", title="ε of all rounds", scale=alt.Scale(type="log"))
    private = alt.Chart().transform_filter("datum.private").encode(x=x, color=colour, y=y)
    bars = private.mark_rule().encode(y=low, y2="high:Q")
    lines = private.mark_line().encode(strokeDash=dash)
    points = private.mark_point(filled=True, size=30, opacity=1).encode(tooltip=["method:N", *score_tooltip(data)])
    levels = alt.Chart().transform_filter("!datum.private").mark_rule(strokeDash=[2, 4]).encode(y=y, color=colour)
    chart = alt.layer(bars, lines, points, levels, data=inline(frame)).properties(width=WIDTH, height=300)
    caption = _caption(data, rows, rule)
    if not is_private.all():
        caption += "; dotted: without a guarantee"
    return Chart(chart, caption)


def over_upload(data: ChartData) -> Chart:
    """Return the score against the gigabytes (10⁹ bytes) that clients have sent in all rounds. A point is a method.

    Raises:
        UsageError: All methods sent equally much, or nothing.
    """
    rows, rule = _means(data)
    sent = data.tables.rounds.groupby(TRIAL)["bytes_up"].sum() / 1e9
    rows = rows.assign(x=rows["order"].map(_by_group(data, sent)), line=_labels_of_compressions(rows))
    rows = rows[rows["x"] > 0]
    if rows["x"].nunique() < 2:
        raise UsageError("plot: clients of all methods sent equally much; compression.name changes that")
    frame = rows[["line", "x", "y", "low", "high", "seeds"]]
    colour, shape = _points_of(frame["line"])
    x = alt.X("x:Q", title="GB that clients sent in all rounds", scale=alt.Scale(type="log", nice=False, padding=20))
    base = alt.Chart().encode(x=x, color=colour)
    bars = base.mark_rule().encode(y=alt.Y("low:Q", scale=FROM_ANYWHERE, title=data.score_title), y2="high:Q")
    tooltip = ["line:N", alt.Tooltip("x:Q", title="GB"), *score_tooltip(data)]
    points = base.mark_point(filled=True, size=70, opacity=1).encode(y="y:Q", shape=shape, tooltip=tooltip)
    chart = alt.layer(bars, points, data=inline(frame)).properties(width=WIDTH, height=300)
    return Chart(chart, _caption(data, rows, rule))


def _labels_of_compressions(rows: pd.DataFrame) -> list[str]:
    own = [key for key in rows if key.startswith("compression.")]
    methods = line_labels(rows, own)
    if not own:
        return methods
    compressions = _component_labels(rows, "compression")
    return [f"{method}, {compression}" for method, compression in zip(methods, compressions, strict=True)]


def _points_of(labels: pd.Series) -> tuple[alt.Color, alt.Shape]:
    """Return colours and shapes that tell labels apart."""
    names = list(dict.fromkeys(labels))
    colours, shapes = colours_with(_SHAPES, len(names))
    legend = alt.Legend(title=None, orient="bottom", columns=2, labelLimit=0, symbolSize=60)
    colour = alt.Color("line:N", scale=alt.Scale(domain=names, range=colours), legend=legend)
    shape = alt.Shape("line:N", scale=alt.Scale(domain=names, range=shapes), legend=legend)
    return colour, shape


def attacks_by_rules(data: ChartData) -> Chart:
    """Return a heat map of attacks and robust rules for each method.

    Raises:
        UsageError: Neither the attack nor the rule varies.
    """
    rows, rule = _means(data)
    rows = rows.assign(attack=_component_labels(rows, "attack"), rule=_component_labels(rows, "robust"))
    if max(rows["attack"].nunique(), rows["rule"].nunique()) < 2:
        raise UsageError("plot: neither attack.name nor robust.name varies in these results")
    own = [key for key in rows if key.startswith(("attack.", "robust."))]
    rows = rows.assign(line=line_labels(rows, own))
    lines = list(dict.fromkeys(rows["line"]))
    columns = min(2, len(lines))
    panels = []
    for line in lines[:_MOST_PANELS]:
        panel = _heat_map(rows[rows["line"] == line], data)
        panels.append(panel.properties(title=line, width=alt.Step(WIDTH // (10 * columns))))
    caption = _caption(data, rows, rule)
    if len(lines) > len(panels):
        caption += f"; {len(lines) - len(panels)} more methods are not drawn"
    return Chart(alt.concat(*panels, columns=columns), caption)


def _heat_map(rows: pd.DataFrame, data: ChartData) -> Any:
    frame = rows[["attack", "rule", "y", "low", "high", "seeds"]]
    attacks = alt.Y("attack:N", title="attack", sort=list(dict.fromkeys(rows["attack"])))
    axis = alt.Axis(labelAngle=-35, labelOverlap=False, labelLimit=0)
    rules = alt.X("rule:N", title="robust rule", sort=list(dict.fromkeys(rows["rule"])), axis=axis)
    low = float(frame["y"].min())
    high = float(frame["y"].max())
    colour = alt.Color("y:Q", title=data.score_title, scale=alt.Scale(scheme="viridis", domain=[low, high]))
    is_dark = f"datum.y < {(low + high) / 2:.6g}"
    base = alt.Chart().encode(x=rules, y=attacks)
    cells = base.mark_rect().encode(color=colour, tooltip=["attack:N", "rule:N", *score_tooltip(data)])
    text_colour = alt.condition(is_dark, alt.value("white"), alt.value("black"))
    numbers = base.mark_text().encode(text=alt.Text("y:Q", format=".3~g"), color=text_colour)
    return alt.layer(cells, numbers, data=inline(frame))


def _means(data: ChartData) -> tuple[pd.DataFrame, str]:
    """Return the means over clients with their methods and bounds, and the rule that picks the round."""
    rows, rule = data.scores()
    rows = with_methods(rows[rows["quantity"] == "mean"])
    return with_bounds(rows, data), rule


def _caption(data: ChartData, rows: pd.DataFrame, rule: str) -> str:
    picked = RULE_CAPTIONS[rule].format(criterion=data.criterion)
    return f"{data.experiment}: {data.average}, {picked}, {seeds_words(rows['seeds'])}"


def _by_group(data: ChartData, by_trial: pd.Series) -> pd.Series:
    """Return the mean over the trials of a group, by the group's `order`, of values by experiment and trial."""
    groups = data.trials[[*TRIAL, "order"]].merge(by_trial.rename("value").reset_index(), on=TRIAL)
    means: pd.Series = groups.groupby("order")["value"].mean()
    return means


def _component_labels(rows: pd.DataFrame, kind: str) -> Sequence[str]:
    """Return the name of the attack or rule of each row, with those of its keys that vary among rows of this name."""
    if f"{kind}.name" not in rows:
        return ["all"] * len(rows)
    names = value_texts(rows, f"{kind}.name")
    labels = names.copy()
    for key in rows:
        if not key.startswith(f"{kind}.") or key == f"{kind}.name":
            continue
        texts = value_texts(rows, key)
        varies = texts.groupby(names).transform("nunique") > 1
        short = key.removeprefix(f"{kind}.")
        labels[varies] += f" {short}=" + texts[varies]
    return list(labels)
