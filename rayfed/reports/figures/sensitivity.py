"""Sensitivity to hyperparameters: the score against each value that a sweep varied."""

import math
from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.records.metric_names import is_fraction
from rayfed.reports.captions import RULE_CAPTIONS, average_words
from rayfed.reports.chart_data import setting_texts, varying_keys
from rayfed.reports.figures.data import FigureData
from rayfed.reports.figures.style import COLOURS, legend_below, new_figure, plain_axes, seeds_words
from rayfed.reports.hyperparameter_groups import format_setting

_MOST_PANELS = 6


def draw_sensitivity(data: FigureData) -> Figure:
    """Return a panel for each key that varies, or for `data.key`; a line is an algorithm with its other values.

    Raises:
        UsageError: nothing varies, or not that key.
    """
    rows, rule = data.scores()
    rows = rows[rows["quantity"] == "mean"]
    keys = varying_keys(rows)
    if data.key is not None:
        names = [name for name in keys if data.key in (name, name.removeprefix("algorithm."))]
        if not names:
            near = suggestion(data.key, keys) if keys else "no hyperparameter does"
            raise UsageError(f"key={data.key}: does not vary; {near}")
        keys = names
    if not keys:
        raise UsageError("plot: no hyperparameter varies in these results, so there is no sensitivity to show")
    left_out = keys[_MOST_PANELS:]
    keys = keys[:_MOST_PANELS]
    columns = min(3, len(keys))
    lines = -(-len(keys) // columns)
    figure = new_figure(max(6.6, 3.4 * columns), 0.6 + 3.4 * lines)
    labels: dict[str, None] = {}
    for number, key in enumerate(keys):
        labels |= dict.fromkeys(_panel(figure.add_subplot(lines, columns, number + 1), rows, key, keys, data))
    for axes in figure.axes[::columns]:
        axes.set_ylabel(f"{data.split} {data.metric}" + (" (%)" if is_fraction(data.metric) else ""))
    caption = RULE_CAPTIONS[rule].format(criterion=data.criterion)
    average = average_words(data.tables.metrics, data.split, data.metric)
    more = f"; not shown: {', '.join(left_out)}" if left_out else ""
    words = f"{data.experiment}: {average}, {caption}, {seeds_words(rows['seeds'])}{more}"
    figure.suptitle(words, fontsize=8, x=0.01, ha="left")
    if len(keys) == 1:
        legend_below(figure, list(labels))
    return figure


def _panel(axes: Axes, rows: pd.DataFrame, key: str, keys: list[str], data: FigureData) -> list[str]:
    """Draw one key, and return the labels of the lines."""
    scale = 100 if is_fraction(data.metric) else 1
    rows = rows[rows["algorithm"].isin(_varying(rows, key))]
    texts = setting_texts(rows, key)
    numbers = {text: _number(text) for text in texts}
    values = sorted(numbers, key=lambda text: (math.isnan(numbers[text]), numbers[text], text))  # numbers come first
    span = numbers[values[0]], numbers[values[-1]]  # NaN where there is another value than a number
    is_log = span[0] > 0 and span[1] / span[0] >= 20 and len(set(numbers.values())) == len(numbers)
    place = {text: (numbers[text] if is_log else index) for index, text in enumerate(values)}
    rows = rows.assign(x=texts.map(place), y=rows["mean"] * scale, error=rows["sd"].fillna(0.0) * scale)
    others = {other: _varying(rows, other) for other in varying_keys(rows) if other != key}
    rows = rows.assign(label=[_line_label(row, others) for _, row in rows.iterrows()]).sort_values("order")
    labels = []
    for index, (label, line) in enumerate(rows.groupby("label", sort=False)):
        line = line.sort_values("x")
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(
            line["x"], line["y"], line["error"], color=colour, marker="o", ms=4, capsize=2, lw=1.4, label=label
        )
        labels.append(str(label))
        if (best := line[line["chosen"]]).shape[0]:
            axes.plot(best["x"], best["y"], marker="o", ms=9, mfc="none", mec=colour, lw=0)
    if is_log:
        axes.set_xscale("log")
    places = [place[value] for value in values]
    axes.set_xticks(places, values, fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{key}   (ring: chosen by validation)" if rows["chosen"].any() else key)
    if len(keys) > 1:
        axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)
    axes.margins(x=0.08)
    return labels


def _varying(rows: pd.DataFrame, key: str) -> set[str]:
    """Return the algorithms of `rows` that have several values of a key."""
    counts = setting_texts(rows, key).groupby(rows["algorithm"]).nunique()
    return set(counts.index[counts > 1])


def _line_label(row: pd.Series, others: Mapping[str, set[str]]) -> str:
    """Return the algorithm of a row and the values of those of the `others` that vary for it."""
    pairs = [
        f"{key.removeprefix('algorithm.')}={format_setting(key, row[key])}"
        for key, algorithms in others.items()
        if row["algorithm"] in algorithms
    ]
    return " ".join(filter(None, [str(row["algorithm"]), ", ".join(pairs)]))


def _number(text: str) -> float:
    """Return the number that a text is, or NaN."""
    try:
        return float(text)
    except ValueError:
        return math.nan
