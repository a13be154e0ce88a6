"""What plots are drawn from: the tables of one experiment, summarised for one metric, point, split and rule."""

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.records.storage import Storage
from rayfed.reports.read import Tables
from rayfed.reports.render import rows_of_rule
from rayfed.reports.row_filter import filter_rows
from rayfed.reports.summary import Summary, countable_trials, summarise


@dataclass(frozen=True)
class FigureData:
    """The results of one experiment and what to show of them; the choices are those of `report.render`.

    Attributes:
        tables: the tables of one experiment.
        home: its folder.
        given_metric: the metric, or None for the one that chooses.
        point, rule: what to show.
        given_split: the split, or None for the default.
        key: the configuration key on the x axis of a sensitivity plot; None: each that varies.
        given_summary: the summary of `tables`, if the caller has it.
    """

    tables: Tables
    home: Storage
    given_metric: str | None = None
    point: str | None = None
    given_split: str | None = None
    rule: str | None = None
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
        return self.given_metric or self.criterion

    @cached_property
    def summary(self) -> Summary:
        return self.given_summary or summarise(self.tables)

    @cached_property
    def trials(self) -> pd.DataFrame:
        """The trials that count; see `countable_trials`.

        Raises:
            UsageError: no trial is done.
        """
        done = countable_trials(self.tables)[0]
        if done.empty:
            raise UsageError("nothing to plot, because no trial is done yet")
        return done

    @property
    def split(self) -> str:
        return str(self.filtered_curves["split"].iloc[0])

    @cached_property
    def filtered_curves(self) -> pd.DataFrame:
        """The rows of `Summary.curves` at the chosen metric, point and split."""
        if self.summary.curves.empty:
            raise UsageError("nothing to plot, because no trial is done yet")
        return self._filtered(self.summary.curves)

    def curves(self) -> pd.DataFrame:
        """Return the mean over clients by round and method."""
        return self.filtered_curves[self.filtered_curves["quantity"] == "mean"]

    def scores(self) -> tuple[pd.DataFrame, str]:
        """Return the rows of `Summary.rows` under the rule, and the rule."""
        if self.summary.rows.empty:
            raise UsageError("nothing to plot, because no trial is done yet")
        return rows_of_rule(self._filtered(self.summary.rows), self.rule)

    def _filtered(self, rows: pd.DataFrame) -> pd.DataFrame:
        return filter_rows(rows, self.tables, metric=self.metric, point=self.point, split=self.given_split)
