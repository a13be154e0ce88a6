"""What all charts share: their data, colours, the methods that are drawn, captions and files."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.paths import writing
from rayfed.core.records import is_fraction
from rayfed.records.storage import Storage
from rayfed.reports.read import Tables
from rayfed.reports.summary import Summary, View, average_words, filter_rows, range_words, rows_of_rule

SUFFIXES = (".png", ".pdf", ".svg")
MOST_LINES = 8
MOST_ROWS = 16
SHOWN = "shown"
"""The name of the parameter that lists the methods to draw."""
# Okabe and Ito's colours, which can be told apart with every common colour blindness, without the pale yellow.
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
        return 100 if is_fraction(self.metric) else 1

    @property
    def score_title(self) -> str:
        """The title of an axis of scores."""
        return f"{self.split} {self.metric}" + (" (%)" if self.scale == 100 else "")

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
        return self.filtered_curves[self.filtered_curves["quantity"] == "mean"]

    def scores(self) -> tuple[pd.DataFrame, str]:
        """Return the rows of `Summary.rows` that the view shows, and the rule."""
        return rows_of_rule(self._filtered(self.summary.rows), self.view.rule)

    def _filtered(self, rows: pd.DataFrame) -> pd.DataFrame:
        if not rows.empty:
            rows = filter_rows(rows, self.tables, self.view)
            rows = rows[np.isfinite(rows["mean"])]
        return some(rows)


def some(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows`; UsageError if there are none."""
    if rows.empty:
        raise UsageError("nothing to plot, because no trial is done yet, no round was recorded or no mean is finite")
    return rows


def inline(frame: pd.DataFrame) -> alt.InlineData:
    """Return the data of a chart as CSV, which takes half the room of JSON."""
    switches = frame.select_dtypes("bool").columns
    text = frame.astype(dict.fromkeys(switches, int)).to_csv(index=False, float_format="%.6g")
    numbers = dict.fromkeys(frame.select_dtypes("number").columns, "number")
    parse = {**numbers, **dict.fromkeys(switches, "boolean")}
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=parse))


def method_label(row: Any) -> str:
    return " ".join(filter(None, [str(row["algorithm"]), str(row["hyperparameters"])]))


def with_methods(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows`, sorted by method, with the columns `method` (its label) and `row` (the label on several lines)."""
    rows = rows.sort_values("order", kind="stable")
    labels = [method_label(row) for row in rows[["algorithm", "hyperparameters"]].to_dict("records")]
    return rows.assign(method=labels, row=["\n".join(textwrap.wrap(label, _ROW_CHARACTERS)) for label in labels])


def drawn_methods(rows: pd.DataFrame, most: int) -> tuple[list[str], str]:
    """Return the methods to draw, and a remark on those that are not drawn.

    If there are more than `most`, each algorithm is drawn only with the hyperparameters that validation chose, or with
    its first ones if validation chose none.
    """
    if rows["order"].nunique() <= most:
        return list(rows["method"].unique()), ""
    ranked = rows.sort_values(["chosen", "order"], ascending=[False, True])
    kept = ranked.drop_duplicates("algorithm").sort_values("order")
    what = "hyperparameters chosen by validation" if kept["chosen"].all() else "first hyperparameters of each algorithm"
    return list(kept["method"]), f"; {what} only"


def of_methods(chart: Any, rows: pd.DataFrame, caption: str, most: int = MOST_ROWS) -> Chart:
    """Return `chart` with the methods that `drawn_methods` returns; a page may show other methods of `rows`."""
    shown, remark = drawn_methods(rows, most)
    parameter = alt.param(name=SHOWN, value=shown)
    chart = chart.transform_filter(f"indexof({SHOWN}, datum.method) >= 0").add_params(parameter)
    return Chart(chart.properties(usermeta={"methods": list(rows["method"].unique())}), caption, remark)


def row_axis(rows: pd.DataFrame) -> tuple[alt.Y, alt.Step]:
    """Return the y axis of a chart with a row per method, and the height of a row."""
    order = list(rows["row"].unique())
    most = max(label.count("\n") + 1 for label in order)
    return alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelLimit=0)), alt.Step(max(24, 15 * most + 4))


def lines_of(rows: pd.DataFrame, name: str, first: Sequence[str] = ()) -> tuple[alt.Color, alt.StrokeDash]:
    """Return colours and dashes that tell the values of the column `name` apart; those in `first` differ most."""
    labels = list(dict.fromkeys([*first, *rows[name]]))
    dashes = [DASHES[index // len(COLOURS) % len(DASHES)] for index in range(len(labels))]
    across = max(1, 90 // (max(map(len, labels)) + 4))
    legend = alt.Legend(
        title=None,
        orient="bottom",
        columns=1 if across == 1 else alt.ExprRef(f"width < 450 ? 1 : {min(4, across)}"),
        labelLimit=0,
        symbolType="stroke",
        symbolSize=400,
        symbolStrokeWidth=2,
        symbolOpacity=1,
        values=alt.ExprRef(SHOWN) if name == "method" else alt.Undefined,
    )
    colours = [COLOURS[index % len(COLOURS)] for index in range(len(labels))]
    return (
        alt.Color(f"{name}:N", scale=alt.Scale(domain=labels, range=colours), legend=legend),
        alt.StrokeDash(f"{name}:N", scale=alt.Scale(domain=labels, range=dashes), legend=legend),
    )


def seeds_words(seeds: pd.Series) -> str:
    """Return what a band or bar shows: "± 1 sd over 3 seeds", or "a single seed"."""
    numbers = sorted(set(seeds.astype(int)))
    return "a single seed" if numbers == [1] else f"± 1 sd over {range_words(numbers, 'seed')}"


def styled(chart: Any) -> dict[str, Any]:
    """Return a chart as Vega-Lite's JSON, with a single font size."""
    text = {"labelFontSize": _SIZE, "titleFontSize": _SIZE, "titleFontWeight": "normal"}
    config = {
        "font": _FONT,
        "lineBreak": "\n",
        "axis": {**text, "gridOpacity": 0.5, "labelOverlap": True},
        "legend": text,
        "header": text,
        "text": {"fontSize": _SIZE},
        "title": {"fontSize": _SIZE, "fontWeight": "normal", "anchor": "start"},
        "view": {"stroke": None},
    }
    with alt.data_transformers.enable(consolidate_datasets=False):
        spec: dict[str, Any] = chart.to_dict(validate=False)  # validation takes as long as everything else
    fit = {} if "concat" in spec else {"autosize": {"type": "fit-x", "contains": "padding"}}
    return {**spec, **fit, "config": config}


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
