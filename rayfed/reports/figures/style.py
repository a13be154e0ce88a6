"""What all plots share: colours, the methods that are shown, how seeds are named, and the files."""

import io
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from rayfed.core.errors import UsageError

SUFFIXES = (".png", ".pdf", ".svg")
MOST_LINES = 8
# Okabe and Ito's colours, which can be told apart with every common colour blindness, without the pale yellow.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
DASHES = ("-", "--", "-.", ":")
_LABEL_CHARACTERS = 40  # in a line of a label beside a row
_LEGEND_CHARACTERS = 50  # longer labels do not fit beside each other


def new_figure(width: float = 6.6, height: float = 4.2) -> Figure:
    """Return an empty figure; sizes are in inches."""
    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def check_path(path: str | Path) -> None:
    """Raise UsageError if `path` does not end in one of `SUFFIXES`."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise UsageError(f"{path}: plots are PNG, PDF or SVG files; give a name that ends in {', '.join(SUFFIXES)}")


def save(figure: Figure, path: str | Path) -> None:
    """Write `figure` in the format of the suffix of `path`.

    Raises:
        UsageError: `path` has another suffix or cannot be written to.
    """
    check_path(path)
    content = image_bytes(figure, Path(path).suffix.lower().removeprefix("."))
    try:
        Path(path).write_bytes(content)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def image_bytes(figure: Figure, format: str) -> bytes:
    """Return `figure` as a file; the same figure always gives the same bytes, so no date is in it."""
    date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(format)
    image = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "rayfed", "pdf.fonttype": 42}):
        figure.savefig(image, format=format, metadata=date)
    return image.getvalue()


def shown_methods(rows: pd.DataFrame, most: int = MOST_LINES) -> tuple[pd.DataFrame, str]:
    """Return the rows of the methods to draw, and a remark on those that are not drawn.

    If there are more than `most`, only the hyperparameters that validation chose are drawn for each algorithm, or the
    first ones if it chose none.
    """
    if rows["order"].nunique() <= most:
        return rows, ""
    ranked = rows.sort_values(["chosen", "order"], ascending=[False, True])
    kept = ranked.drop_duplicates("algorithm")["order"]
    all_chosen = rows[rows["order"].isin(kept)]["chosen"].all()
    what = "hyperparameters chosen by validation" if all_chosen else "first hyperparameters of each algorithm"
    return rows[rows["order"].isin(kept)], f"; {what} only"


def method_label(row: pd.Series) -> str:
    """Return the name of a method with its hyperparameters."""
    return " ".join(filter(None, [str(row["algorithm"]), str(row["hyperparameters"])]))


def row_labels(labels: Iterable[str]) -> tuple[list[str], float]:
    """Return labels of rows, wrapped so that they leave room for what they label, and the height of a row in inches."""
    wrapped = [textwrap.fill(label, _LABEL_CHARACTERS) for label in labels]
    most = max((label.count("\n") + 1 for label in wrapped), default=1)
    return wrapped, max(0.36, 0.17 * most)


def seeds_words(seeds: pd.Series) -> str:
    """Return what a band or bar shows, given the numbers of seeds: "± 1 sd over 3 seeds", or "a single seed"."""
    numbers = sorted(set(seeds.astype(int)))
    if numbers == [1]:
        return "a single seed"
    return f"± 1 sd over {numbers[0] if len(numbers) == 1 else f'{numbers[0]} to {numbers[-1]}'} seeds"


def plain_axes(axes: Axes) -> None:
    """Draw a light grid, and no frame on the right and at the top."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def title(axes: Axes, text: str) -> None:
    axes.set_title(text, fontsize=8, loc="left", wrap=True)


def legend_below(figure: Figure, labels: Sequence[str]) -> None:
    """Add a legend of all labelled artists below the axes, in two columns if the labels are short."""
    longest = max(map(len, labels), default=0)
    figure.legend(
        loc="outside lower center", ncols=2 if longest <= _LEGEND_CHARACTERS else 1, fontsize=8, frameon=False
    )
