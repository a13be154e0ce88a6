"""Sensitivity to hyperparameters: the score against each value that a sweep varied."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.results.captions import RULE_CAPTIONS, average_words
from rayfed.results.chart_data import varying_keys
from rayfed.results.figures.data import FigureData
from rayfed.results.figures.style import COLOURS, legend_below, new_figure, plain_axes, seeds_words
from rayfed.results.hyperparameter_groups import format_value
from rayfed.results.metric_names import is_fraction
from rayfed.results.summary import selection_criterion

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
    caption = RULE_CAPTIONS[rule].format(criterion=selection_criterion(data.summary.rows))
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
    counts = rows.groupby("algorithm")[key].nunique()
    rows = rows[rows["algorithm"].map(counts) > 1]
    numeric = pd.to_numeric(rows[key], errors="coerce")
    is_numeric = bool(numeric.notna().all())
    values = sorted(numeric.unique()) if is_numeric else sorted(rows[key].map(format_value).unique())
    is_log = is_numeric and values[0] > 0 and values[-1] / values[0] >= 20
    place = {value: (value if is_log else index) for index, value in enumerate(values)}
    x = (numeric if is_numeric else rows[key].map(format_value)).map(place)
    rows = rows.assign(x=x, y=rows["mean"] * scale, error=rows["sd"].fillna(0.0) * scale)
    others = [other for other in varying_keys(rows) if other != key]
    labels = []
    lines = rows.groupby(["algorithm", *others], dropna=False) if others else rows.groupby("algorithm")
    for index, (name, line) in enumerate(lines):
        values_of_others = [] if isinstance(name, str) else list(name)[1:]
        pairs = zip(others, values_of_others, strict=True)
        words = ", ".join(f"{other.removeprefix('algorithm.')}={format_value(value)}" for other, value in pairs)
        label = " ".join(filter(None, [str(line["algorithm"].iloc[0]), words]))
        line = line.sort_values("x")
        colour = COLOURS[index % len(COLOURS)]
        axes.errorbar(
            line["x"], line["y"], line["error"], color=colour, marker="o", ms=4, capsize=2, lw=1.4, label=label
        )
        labels.append(label)
        if (best := line[line["chosen"]]).shape[0]:
            axes.plot(best["x"], best["y"], marker="o", ms=9, mfc="none", mec=colour, lw=0)
    if is_log:
        axes.set_xscale("log")
    places = [place[value] for value in values]
    axes.set_xticks(places, [format_value(float(value)) if is_numeric else value for value in values], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.set_xlabel(f"{key}   (ring: chosen by validation)" if rows["chosen"].any() else key)
    if len(keys) > 1:
        axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)
    axes.margins(x=0.08)
    return labels
