"""What all charts share: their data, colours, the methods that are drawn, captions and files."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.paths import writing
from rayfed.core.round_record import is_fraction
from rayfed.records.storage import Storage
from rayfed.reports.read import Tables
from rayfed.reports.summary import Summary, View, average_words, filter_rows, range_words, rows_of_rule

SUFFIXES = (".png", ".pdf", ".svg")
MOST_LINES = 8
MOST_ROWS = 16
SHOWN = "shown"
"""The name of the parameter that lists the methods to draw."""
# Okabe and Ito's colours, which can be told apart with every common colour blindness, without the pale yellow.
T = TypeVar("T")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F", "#8B5CF6")
DASHES = ([1, 0], [7, 4], [2, 3], [9, 3, 2, 3])
WIDTH = 720
_FONT = "Liberation Sans, Arial, Helvetica, sans-serif"  # the first is the one that vl-convert brings along
_SIZE = 12
_ROW_CHARACTERS = 28  # in a line of a label beside a row
_TITLE_CHARACTERS = 100
_DOTS_PER_INCH = 200


class Chart(NamedTuple):
    """A chart and what it shows.

    Attributes:
        chart: Its parameter `SHOWN`, if it has one, is the list of methods to draw.
        caption: A sentence without its full stop.
        remark: Which methods are drawn, if not all.
    """

    chart: alt.TopLevelMixin
    caption: str
    remark: str = ""


@dataclass(frozen=True)
class ChartData:
    """The results of one experiment, its folder `home`, and what to show of it, its `view`."""

    tables: Tables
    summary: Summary
    home: Storage
    view: View

    @property
    def experiment(self) -> str:
        return str(self.tables.trials["experiment"].iloc[0])

    @property
    def criterion(self) -> str:
        """The metric that chooses rounds and hyperparameters."""
        return self.tables.criteria[self.experiment]

    @property
    def metric(self) -> str:
        return self.view.metric or self.criterion

    @property
    def scale(self) -> int:
        """The factor of values: fractions are shown in percent."""
        if is_fraction(self.metric):
            return 100
        return 1

    @property
    def score_title(self) -> str:
        """The title of an axis of scores."""
        title = f"{self.split} {self.metric}"
        if is_fraction(self.metric):
            title += " (%)"
        return title

    @property
    def average(self) -> str:
        """What means of the scores are over, in words."""
        return average_words(self.tables.counts, self.tables.trials, self.split, self.metric)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The trials that count; see `Tables.done`.

        Raises:
            UsageError: No trial is done.
        """
        return some(self.tables.done)

    @property
    def split(self) -> str:
        return str(self.filtered_curves["split"].iloc[0])

    @cached_property
    def filtered_curves(self) -> pd.DataFrame:
        """The rows of `Summary.curves` that the view shows."""
        return self._filtered(self.summary.curves)

    def curves(self) -> pd.DataFrame:
        """Return the mean over clients by round and method."""
        curves = self.filtered_curves
        return curves[curves["quantity"] == "mean"]

    def scores(self) -> tuple[pd.DataFrame, str]:
        """Return the rows of `Summary.rows` that the view shows, and the rule."""
        rows = self._filtered(self.summary.rows)
        return rows_of_rule(rows, self.view.rule)

    def _filtered(self, rows: pd.DataFrame) -> pd.DataFrame:
        if rows.empty:
            return some(rows)
        shown = filter_rows(rows, self.tables, self.view)
        return some(shown[np.isfinite(shown["mean"])])


def some(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows`; UsageError if there are none."""
    if rows.empty:
        raise UsageError("nothing to plot, because no trial is done yet, no round was recorded or no mean is finite")
    return rows


def inline(frame: pd.DataFrame) -> alt.InlineData:
    """Return the data of a chart as CSV, which takes half the room of JSON."""
    switches = list(frame.select_dtypes("bool"))
    as_numbers = frame.astype(dict.fromkeys(switches, int))
    parse = dict.fromkeys(frame.select_dtypes("number"), "number")
    parse |= dict.fromkeys(switches, "boolean")
    text = as_numbers.to_csv(index=False, float_format="%.6g")
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=parse))


def method_label(row: Any) -> str:
    parts = str(row["algorithm"]), str(row["hyperparameters"])
    return " ".join(filter(None, parts))


def with_methods(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows`, sorted by method, with the columns `method` (its label) and `row` (the label on several lines)."""
    rows = rows.sort_values("order", kind="stable")
    methods = []
    wrapped = []
    for row in rows[["algorithm", "hyperparameters"]].to_dict("records"):
        label = method_label(row)
        methods.append(label)
        wrapped.append("\n".join(textwrap.wrap(label, _ROW_CHARACTERS)))
    return rows.assign(method=methods, row=wrapped)


def drawn_methods(rows: pd.DataFrame, most: int) -> tuple[list[str], str]:
    """Return the methods to draw, and a remark on those that are not drawn.

    If there are more than `most`, each algorithm is drawn only with the hyperparameters that validation chose, or with
    its first ones if validation chose none.
    """
    if rows["order"].nunique() <= most:
        return list(rows["method"].unique()), ""
    ranked = rows.sort_values(["chosen", "order"], ascending=[False, True])
    kept = ranked.drop_duplicates("algorithm").sort_values("order")
    methods = list(kept["method"])
    if kept["chosen"].all():
        return methods, "; hyperparameters chosen by validation only"
    return methods, "; first hyperparameters of each algorithm only"


def of_methods(chart: Any, rows: pd.DataFrame, caption: str, most: int = MOST_ROWS) -> Chart:
    """Return `chart` with the methods that `drawn_methods` returns; a page may show other methods of `rows`."""
    shown, remark = drawn_methods(rows, most)
    parameter = alt.param(name=SHOWN, value=shown)
    chart = chart.transform_filter(f"indexof({SHOWN}, datum.method) >= 0").add_params(parameter)
    methods = list(rows["method"].unique())
    return Chart(chart.properties(usermeta={"methods": methods}), caption, remark)


def row_axis(rows: pd.DataFrame) -> tuple[alt.Y, alt.Step]:
    """Return the y axis of a chart with a row per method, and the height of a row."""
    order = list(rows["row"].unique())
    lines = []
    for label in order:
        lines.append(label.count("\n") + 1)
    height = max(24, 15 * max(lines) + 4)
    axis = alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelLimit=0))
    return axis, alt.Step(height)


def colours_with(others: Sequence[T], count: int) -> tuple[list[str], list[T]]:
    """Return `count` pairs of a colour and one of `others`, as two lists: all colours with the first, and so on."""
    colours = []
    beside = []
    for index in range(count):
        cycle, place = divmod(index, len(COLOURS))
        colours.append(COLOURS[place])
        beside.append(others[cycle % len(others)])
    return colours, beside


def lines_of(rows: pd.DataFrame, name: str, first: Sequence[str] = ()) -> tuple[alt.Color, alt.StrokeDash]:
    """Return colours and dashes that tell the values of the column `name` apart; those in `first` differ most."""
    labels = list(dict.fromkeys([*first, *rows[name]]))
    colours, dashes = colours_with(DASHES, len(labels))
    values: Any = alt.Undefined
    if name == "method":
        values = alt.ExprRef(SHOWN)
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=_legend_columns(labels),
        labelLimit=0,
        symbolType="stroke",
        symbolSize=400,
        symbolStrokeWidth=2,
        symbolOpacity=1,
        values=values,
    )
    colour_scale = alt.Scale(domain=labels, range=colours)
    colour = alt.Color(f"{name}:N", scale=colour_scale, legend=legend)
    dash_scale = alt.Scale(domain=labels, range=dashes)
    dash = alt.StrokeDash(f"{name}:N", scale=dash_scale, legend=legend)
    return colour, dash


def _legend_columns(labels: Sequence[str]) -> Any:
    """Return how many labels of a legend fit beside each other; one in a narrow chart."""
    longest = max(map(len, labels))
    across = 90 // (longest + 4)
    if across <= 1:
        return 1
    return alt.ExprRef(f"width < 450 ? 1 : {min(4, across)}")


def seeds_words(seeds: pd.Series) -> str:
    """Return what a band or bar shows: "± 1 sd over 3 seeds", or "a single seed"."""
    numbers = sorted(set(seeds.astype(int)))
    if numbers == [1]:
        return "a single seed"
    return f"± 1 sd over {range_words(numbers, 'seed')}"


def styled(chart: Any) -> dict[str, Any]:
    """Return a chart as Vega-Lite's JSON, with a single font size."""
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec: dict[str, Any] = chart.to_dict(validate=False)  # validation takes as long as everything else
    if "concat" not in spec:
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    text = {"labelFontSize": _SIZE, "titleFontSize": _SIZE, "titleFontWeight": "normal"}
    spec["config"] = {
        "font": _FONT,
        "lineBreak": "\n",
        "axis": {**text, "gridOpacity": 0.5, "labelOverlap": True},
        "legend": text,
        "header": text,
        "text": {"fontSize": _SIZE},
        "title": {"fontSize": _SIZE, "fontWeight": "normal", "anchor": "start"},
        "view": {"stroke": None},
    }
    return spec


def save(chart: Chart, path: str | Path) -> None:
    """Write a chart in the format of the suffix of `path`.

    Raises:
        UsageError: `path` does not end in one of `SUFFIXES`, or cannot be written.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in SUFFIXES:
        raise UsageError(f"{path}: plots are PNG, PDF or SVG files; give a name that ends in {', '.join(SUFFIXES)}")
    content = image_bytes(chart, suffix.removeprefix("."))
    with writing(path):
        Path(path).write_bytes(content)


def image_bytes(chart: Chart, format: str) -> bytes:
    """Return a chart as a file; the same chart always gives the same bytes."""
    import vl_convert

    title = textwrap.wrap(chart.caption + chart.remark, _TITLE_CHARACTERS)
    spec = {**styled(chart.chart), "title": title, "background": "white", "padding": 8}
    if format == "svg":
        return str(vl_convert.vegalite_to_svg(spec)).encode()
    if format == "pdf":
        return bytes(vl_convert.vegalite_to_pdf(spec))
    return bytes(vl_convert.vegalite_to_png(spec, ppi=_DOTS_PER_INCH))
