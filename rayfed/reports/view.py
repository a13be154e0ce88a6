"""What of the results is shown, whether as a table, a chart or a page, and the rows of it."""

from dataclasses import dataclass

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.read import Tables
from rayfed.reports.summary import out_of_domain_points

DEFAULT_SPLITS = ("test", "ood", "val", "train")
"""The order in which splits are looked for; some data have no test split."""


@dataclass(frozen=True)
class View:
    """The part of the results that is shown; None stands for a default.

    Attributes:
        metric: The metric; by default, for each experiment, the one that chooses (`Tables.criteria`).
        point: The model scored; by default the one at which each algorithm's paper evaluates, and on the split "ood"
            the global model, or where there is none the downloaded ones.
        split: The split; by default, for each experiment, the first of test, ood, val and train with values there.
        rule: The rule that picks the round; by default `selected` if every trial has a value in the round that
            validation picks, and `final` otherwise.
        select: The metric that chooses rounds and hyperparameters; by default `select.metric` of the runs.
    """

    metric: str | None = None
    point: str | None = None
    split: str | None = None
    rule: str | None = None
    select: str | None = None


DEFAULT_VIEW = View()


def filter_rows(rows: pd.DataFrame, tables: Tables, view: View) -> pd.DataFrame:
    """Return the participants' rows of the metric, the point and the split of `view`, under all rules.

    Args:
        rows: columns experiment, algorithm, order, unseen, point, split, metric, and others. Where there is a column
            `chosen_by_default` (see `Summary`) and `view` has no point, it becomes `chosen`.
        tables: The tables that `rows` summarise.
        view: What to show.

    Raises:
        UsageError: there are no such rows.
    """
    rows = rows[~rows["unseen"]]
    metric, point, split = view.metric, view.point, view.split
    points, of_ood, criteria = tables.points_to_show, out_of_domain_points(rows), tables.criteria
    for name, value in (("metric", metric), ("split", split)):
        if value is not None and value not in set(rows[name]):
            raise UsageError(f"{name}={value}: {suggestion(value, sorted(set(rows[name])))}")
        rows = rows if value is None else rows[rows[name] == value]
    if metric is None:
        rows = rows[rows["metric"] == rows["experiment"].map(criteria)]
    if point is None and "chosen_by_default" in rows:
        rows = rows.assign(chosen=rows["chosen_by_default"])
    keys = zip(rows["experiment"], rows["order"], rows["split"], strict=True)
    shown = [point or (of_ood if of == "ood" else points)[experiment, order] for experiment, order, of in keys]
    at_point = rows[rows["point"] == pd.Series(shown, index=rows.index)]
    if at_point.empty:
        metric = metric or "/".join(sorted(set(criteria.values())))
        what = " ".join(filter(None, [split, metric]))
        raise UsageError(
            f"point={point or '/'.join(sorted(set(shown)))}: no {what} there; known: "
            f"{', '.join(sorted(set(rows['point'])))}"
        )
    if split is not None:
        return at_point
    rank = at_point["split"].map(DEFAULT_SPLITS.index)
    return at_point[rank == rank.groupby(at_point["experiment"]).transform("min")]
