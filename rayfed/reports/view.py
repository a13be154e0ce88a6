"""The part of the results that a table, a chart or a page shows, and its rows."""

from dataclasses import dataclass

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.reports.read import Tables
from rayfed.reports.selection import RULES
from rayfed.reports.summary import out_of_domain_points

DEFAULT_SPLITS = ("test", "ood", "val", "train")
"""The splits in the order in which a default is looked for; some data have no test split."""


@dataclass(frozen=True)
class View:
    """The part of the results that is shown; None stands for a default.

    Attributes:
        metric: The metric; by default, for each experiment, the metric that chooses (`Tables.criteria`).
        point: The model scored; by default the point at which each algorithm's paper evaluates, and on the split "ood"
            the global model, or the downloaded models where there is no global model.
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
        rows: columns experiment, algorithm, order, unseen, point, split, metric, and more. If `view` has no point, the
            column `chosen_by_default` (see `Summary`) becomes `chosen`, where there is such a column.
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


def rows_of_rule(rows: pd.DataFrame, rule: str | None) -> tuple[pd.DataFrame, str]:
    """Return the rows of `rule`, or of the default rule, and the rule.

    Raises:
        UsageError: there are no such rows.
    """
    means = rows[rows["quantity"] == "mean"]
    groups = {name: set(zip(group["order"], group["seeds"], strict=True)) for name, group in means.groupby("rule")}
    if rule is None:
        rule = "selected" if groups.get("selected") == groups["final"] else "final"
    if rule not in RULES:
        raise UsageError(f"rule={rule}: {suggestion(rule, RULES)}")
    if rule not in groups:
        raise UsageError(
            f"rule={rule}: no validation split was evaluated at this point, or this metric was not measured in the "
            "round that the rule picks; use final"
        )
    return rows[rows["rule"] == rule], rule
