"""The kinds of charts by name. Their modules are imported when a chart is drawn, since Altair takes half a second."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rayfed.core.errors import UsageError
from rayfed.reports.read import Tables
from rayfed.reports.summary import DEFAULT_VIEW, View, summarise

if TYPE_CHECKING:
    from rayfed.reports.charts.chart import Chart, ChartData


class Kind(NamedTuple):
    """A kind of chart: the place of its function as module:function, and what it shows."""

    function: str
    shows: str


KINDS: Mapping[str, Kind] = {
    "curves": Kind("scores:over_rounds", "the score over rounds"),
    "bytes": Kind("scores:over_bytes", "the score against the bytes sent"),
    "clock": Kind("scores:over_clock", "the score over the time on the simulated clock"),
    "epsilon": Kind("scores:over_epsilon", "the score against the privacy budget spent"),
    "privacy": Kind("channel:over_budget", "the score against the privacy budget of all rounds"),
    "upload": Kind("channel:over_upload", "the score against the bytes that clients sent in all rounds"),
    "attacks": Kind("channel:attacks_by_rules", "the score by attack and robust rule"),
    "clients": Kind("clients:over_rounds", "the score of each client over rounds, as a heat map"),
    "sensitivity": Kind("scores:of_each_key", "the score against each hyperparameter that varies"),
    "partition": Kind("recorded:all_partitions", "who holds how many examples of which class"),
    "tsne": Kind("recorded:last_of_each_method", "maps of representations, where metrics.tsne was measured"),
    "time": Kind("recorded:seconds", "where the time of a round went"),
}


def chart_data(tables: Tables, view: View = DEFAULT_VIEW) -> "ChartData":
    """Return what charts are drawn from: the tables of one experiment, and what to show of them.

    Raises:
        UsageError: `tables` has several experiments.
    """
    from rayfed.reports.charts.chart import ChartData

    if len(tables.trials):
        recorded = tables.trials
    else:
        recorded = tables.counts
    names = sorted(set(recorded["experiment"]))
    if len(names) > 1:
        raise UsageError(f"a plot shows one experiment; choose with --experiment: {', '.join(names)}")
    return ChartData(tables, summarise(tables), tables.places[names[0]], view)


def draw(kind: str, data: "ChartData") -> "Chart":
    """Return a chart; `kind` is one of `KINDS`.

    Raises:
        UsageError: There is nothing to plot.
    """
    name, _, function = KINDS[kind].function.partition(":")
    module = importlib.import_module(f"rayfed.reports.charts.{name}")
    chart: Chart = getattr(module, function)(data)
    return chart


def plot(tables: Tables, path: str | Path, kind: str = "curves", view: View = DEFAULT_VIEW) -> None:
    """Write a chart as PNG, PDF or SVG, as the suffix of `path` says; `view` is that of `ChartData`.

    Raises:
        UsageError: There are several experiments or nothing to plot, or `path` cannot be written.
    """
    from rayfed.reports.charts.chart import save

    save(draw(kind, chart_data(tables, view)), path)
