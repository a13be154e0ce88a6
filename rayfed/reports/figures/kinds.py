"""The kinds of plots, by name. Modules are imported when a plot is drawn: matplotlib takes most of a second."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rayfed.records.storage import open_storage
from rayfed.reports.read import Tables

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from rayfed.reports.figures.data import FigureData


class Kind(NamedTuple):
    """A kind of plot: where its function is, and what it shows."""

    function: str
    shows: str


KINDS: Mapping[str, Kind] = {
    "curves": Kind("curves:draw_curves", "the score over rounds"),
    "bytes": Kind("curves:draw_against_bytes", "the score against the bytes sent"),
    "epsilon": Kind("curves:draw_against_epsilon", "the score against the privacy budget spent"),
    "sensitivity": Kind("sensitivity:draw_sensitivity", "the score against each hyperparameter that varies"),
    "clients": Kind("clients:draw_clients", "a heat map of methods and clients"),
    "partition": Kind("partitions:draw_partitions", "who holds how many examples of which class"),
    "tsne": Kind("maps:draw_maps", "maps of representations, where metrics.tsne was measured"),
    "time": Kind("time:draw_time", "where the time of a round went"),
}


def figure_data(folder: str | Path, tables: Tables, **choices: Any) -> "FigureData":
    """Return what plots are drawn from; `choices` are the other attributes of `FigureData`.

    Raises:
        UsageError: `tables` has several experiments.
    """
    from rayfed.reports.figures.data import FigureData

    names = sorted(set(tables.trials["experiment"]) | set(tables.metrics["experiment"]))
    return FigureData(tables, open_storage(folder).child(names[0]), **choices)


def draw(kind: str, data: "FigureData") -> "Figure":
    """Return a plot; `kind` is one of `KINDS`.

    Raises:
        UsageError: there is nothing to plot.
    """
    module, _, function = KINDS[kind].function.partition(":")
    figure: Figure = getattr(importlib.import_module(f"rayfed.reports.figures.{module}"), function)(data)
    return figure


def plot(folder: str | Path, tables: Tables, path: str | Path, kind: str = "curves", **choices: Any) -> None:
    """Write a plot as PNG, PDF or SVG, as the suffix of `path` says; `choices` are those of `FigureData`.

    Raises:
        UsageError: several experiments, nothing to plot, or a path that cannot be written to.
    """
    from rayfed.reports.figures.style import check_path, save

    check_path(path)
    save(draw(kind, figure_data(folder, tables, **choices)), path)
