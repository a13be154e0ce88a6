"""What all charts share: colours, the methods that are drawn, how seeds are named, and the files."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.file_names import writing
from rayfed.reports.charts.chart import Chart

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


def inline(frame: pd.DataFrame) -> alt.InlineData:
    """Return the data of a chart; as CSV, they take half the room of JSON."""
    switches = frame.select_dtypes("bool").columns
    text = frame.astype(dict.fromkeys(switches, int)).to_csv(index=False, float_format="%.6g")
    numbers = dict.fromkeys(frame.select_dtypes("number").columns, "number")
    parse = {**numbers, **dict.fromkeys(switches, "boolean")}
    return alt.InlineData(values=text, format=alt.CsvDataFormat(type="csv", parse=parse))


def method_label(row: Any) -> str:
    """Return the name of a method with its hyperparameters."""
    return " ".join(filter(None, [str(row["algorithm"]), str(row["hyperparameters"])]))


def with_methods(rows: pd.DataFrame) -> pd.DataFrame:
    """Return `rows`, sorted by method, with the columns `method`, its label, and `row`, the label on several lines."""
    rows = rows.sort_values("order", kind="stable")
    labels = [method_label(row) for row in rows[["algorithm", "hyperparameters"]].to_dict("records")]
    return rows.assign(method=labels, row=["\n".join(textwrap.wrap(label, _ROW_CHARACTERS)) for label in labels])


def drawn_methods(rows: pd.DataFrame, most: int) -> tuple[list[str], str]:
    """Return the methods to draw, and a remark on those that are not drawn.

    If there are more than `most`, only the hyperparameters that validation chose are drawn for each algorithm, or the
    first ones if it chose none.

    Args:
        rows: columns order, algorithm, method and, where validation may have chosen, chosen.
    """
    if rows["order"].nunique() <= most:
        return list(rows["method"].unique()), ""
    chosen = rows["chosen"] if "chosen" in rows else pd.Series(False, index=rows.index)
    ranked = rows.assign(chosen=chosen).sort_values(["chosen", "order"], ascending=[False, True])
    kept = ranked.drop_duplicates("algorithm").sort_values("order")
    what = "hyperparameters chosen by validation" if kept["chosen"].all() else "first hyperparameters of each algorithm"
    return list(kept["method"]), f"; {what} only"


def of_methods(chart: Any, rows: pd.DataFrame, shown: Sequence[str]) -> Any:
    """Return `chart` of `rows` with the methods `shown`, in place of which a page may show any."""
    parameter = alt.param(name=SHOWN, value=list(shown))
    chart = chart.transform_filter(f"indexof({SHOWN}, datum.method) >= 0").add_params(parameter)
    return chart.properties(usermeta={"methods": list(rows["method"].unique())})


def row_axis(rows: pd.DataFrame) -> tuple[alt.Y, alt.Step]:
    """Return the y axis of a chart with a row per method, and the height of a row; `rows` is from `with_methods`."""
    order = list(rows["row"].unique())
    most = max(label.count("\n") + 1 for label in order)
    return alt.Y("row:N", sort=order, title=None, axis=alt.Axis(labelLimit=0)), alt.Step(max(24, 15 * most + 4))


def lines_of(rows: pd.DataFrame, name: str, first: Sequence[str] = ()) -> tuple[alt.Color, alt.StrokeDash]:
    """Return colours and dashes of the lines that the column `name` tells apart; those of `first` differ most."""
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
    """Return what a band or bar shows, given the numbers of seeds: "± 1 sd over 3 seeds", or "a single seed"."""
    numbers = sorted(set(seeds.astype(int)))
    if numbers == [1]:
        return "a single seed"
    return f"± 1 sd over {numbers[0] if len(numbers) == 1 else f'{numbers[0]} to {numbers[-1]}'} seeds"


def styled(chart: Any) -> dict[str, Any]:
    """Return a chart as Vega-Lite's JSON, in one size of type."""
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
        spec: dict[str, Any] = chart.to_dict(validate=False)  # validation takes as long as all else
    fit = {} if "concat" in spec else {"autosize": {"type": "fit-x", "contains": "padding"}}
    return {**spec, **fit, "config": config}


def check_path(path: str | Path) -> None:
    """Raise UsageError if `path` does not end in one of `SUFFIXES`."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: plots are PNG, PDF or SVG files; give a name that ends in {', '.join(SUFFIXES)}")


def save(chart: Chart, path: str | Path) -> None:
    """Write a chart in the format of the suffix of `path`.

    Raises:
        UsageError: `path` has another suffix or cannot be written to.
    """
    check_path(path)
    content = image_bytes(chart, Path(path).suffix.lower().removeprefix("."))
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
