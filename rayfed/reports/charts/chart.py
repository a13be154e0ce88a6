"""What every chart is drawn from, and what a chart is."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import altair as alt
import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.records.metric_names import is_fraction
from rayfed.records.storage import Storage
from rayfed.reports.read import Tables
from rayfed.reports.render import rows_of_rule
from rayfed.reports.summary import Summary, summarise
from rayfed.reports.view import DEFAULT_VIEW, View, filter_rows


class Chart(NamedTuple):
    """A chart and what it shows.

    Attributes:
        chart: the chart; if it has the parameter `style.SHOWN`, that is the list of methods to draw.
        caption: a sentence without its full stop.
        remark: which methods are drawn, if not all.
    """

    chart: alt.TopLevelMixin
    caption: str
    remark: str = ""


@dataclass(frozen=True)
class ChartData:
    """The results of one experiment, and what to show of them.

    Attributes:
        tables: the tables of one experiment.
        home: its folder.
        view: what to show.
        key: the configuration key on the x axis of a sensitivity chart; None: each that varies.
        given_summary: the summary of `tables`, if the caller has it.
    """

    tables: Tables
    home: Storage
    view: View = DEFAULT_VIEW
    key: str | None = None
    given_summary: Summary | None = None

    def __post_init__(self) -> None:
        names = sorted(set(self.tables.trials["experiment"]))
        if len(names) > 1:
            raise UsageError(f"a plot shows one experiment; choose with --experiment: {', '.join(names)}")

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
        """What values are multiplied with: fractions are shown in percent."""
        return 100 if is_fraction(self.metric) else 1

    @property
    def score_title(self) -> str:
        """The title of an axis of scores."""
        return f"{self.split} {self.metric}" + (" (%)" if self.scale == 100 else "")

    @cached_property
    def summary(self) -> Summary:
        return self.given_summary or summarise(self.tables)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The trials that count; see `Tables.done`.

        Raises:
            UsageError: no trial is done.
        """
        done = self.tables.done
        if done.empty:
            raise UsageError("nothing to plot, because no trial is done yet")
        return done

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
        if rows.empty:
            raise UsageError("nothing to plot, because no trial is done yet or no mean is finite")
        return rows
