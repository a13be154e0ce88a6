"""Mean and standard deviation over seeds for each algorithm and its hyperparameters, and the choice by validation."""

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from rayfed.core.records import POINTS
from rayfed.records.metric_names import ranking_cost
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, criterion_rows, pick_rounds
from rayfed.reports.trial_groups import LEFT_OUT

SCORE = ["unseen", "point", "split", "metric", "higher_is_better", "rule", "quantity"]


class Summary(NamedTuple):
    """Statistics over seeds.

    Columns of `rows` and `curves`: experiment, algorithm, hyperparameters, order, unseen, point, split, metric,
    higher_is_better, (rule | round), quantity, `mean`, `sd` (ddof=1, NaN for one seed), `seeds` (their number),
    `chosen`, `chosen_by_default`, and the hyperparameters that vary.

    Attributes:
        rows: one row per group of trials and score.
        curves: the same with a row per round in place of one per rule.
        notes: sentences on what the reader should know.
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    notes: list[str]


def summarise(tables: Tables) -> Summary:
    """Return means over seeds of the trials that are done; the notes count the other trials.

    For each algorithm and point, `chosen` marks the hyperparameters with the best mean over seeds of the validation
    values of the experiment's criterion at the round that `selected` picks, or the first ones on a tie. The choice is
    the same for all metrics. Without a validation split nothing is chosen, unless the algorithm has only one group of
    trials. Test values never choose. `chosen_by_default` marks the choice for tables that show each group of trials at
    its own point (see `Tables.points_to_show`), in the rows of every point.
    """
    done = tables.done
    curves = tables.curves.merge(done[TRIAL], on=TRIAL)
    rows = _over_seeds(pick_rounds(curves, tables.criteria), done, SCORE)
    chosen = (
        _chosen(rows, ["experiment", "algorithm", "point"], tables.criteria)
        .drop(columns="algorithm")
        .assign(chosen=True)
    )
    shown = at_default_points(rows, tables.points_to_show)
    by_default = _chosen(shown, ["experiment", "algorithm"], tables.criteria)
    by_default = by_default.drop(columns="algorithm").assign(chosen_by_default=True)
    over_rounds = _over_seeds(curves, done, [*[name for name in SCORE if name != "rule"], "round"])
    rows, over_rounds = (
        frame.merge(chosen, on=["experiment", "order", "point"], how="left")
        .merge(by_default, on=["experiment", "order"], how="left")
        .assign(**{name: lambda merged, name=name: merged[name].eq(True) for name in ("chosen", "chosen_by_default")})
        for frame in (rows, over_rounds)
    )
    return Summary(rows, over_rounds, tables.notes)


def out_of_domain_points(rows: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Return the point to show on the split "ood" by (experiment, order): the global model, or else the downloaded."""
    present = rows[(rows["split"] == "ood") & ~rows["unseen"]].drop_duplicates(["experiment", "order", "point"])
    return {
        (str(experiment), int(order)): min(group["point"], key=POINTS.index)
        for (experiment, order), group in present.groupby(["experiment", "order"])
    }


def at_default_points(rows: pd.DataFrame, points: Mapping[tuple[str, int], str]) -> pd.DataFrame:
    """Return those of `rows` (experiment, order, point, ...) that are at their group's point in `points`."""
    shown = [points.get(key) for key in zip(rows["experiment"], rows["order"], strict=True)]
    return rows[rows["point"] == pd.Series(shown, index=rows.index, dtype=object)]


def seed_values(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return one value per seed: columns experiment, order, seed, `by` (with metric and quantity), value.

    Where the trials of a seed leave out one domain each, the value is their mean, and for `worst` the worst of them.
    """
    rows = values.merge(trials[[*TRIAL, "order", "seed"]], on=TRIAL)
    groups = rows.groupby(["experiment", "order", "seed", *by])["value"].agg(["mean", "min", "max"]).reset_index()
    worst = groups["min"].where(groups["higher_is_better"], groups["max"])
    value = worst.where(groups["quantity"] == "worst", groups["mean"])
    return groups.drop(columns=["mean", "min", "max"]).assign(value=value)


def _over_seeds(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    group = ["experiment", "order"]
    grouped = seed_values(values, trials, by).groupby([*group, *by])["value"]
    statistics = grouped.agg(mean="mean", sd="std", seeds="count").reset_index()  # pandas divides by n - 1
    described = trials.drop(columns=["trial", "seed", "status", "started", LEFT_OUT]).drop_duplicates(group)
    return described.merge(statistics, on=group).sort_values([*group, *by], ignore_index=True)


def _chosen(rows: pd.DataFrame, keys: list[str], criteria: Mapping[str, str]) -> pd.DataFrame:
    """Return `keys` and order of the group of trials that validation prefers, for each value of `keys`."""
    participants = rows[~rows["unseen"]]
    selected = participants[(participants["rule"] == "selected") & (participants["quantity"] == "mean")]
    scores = criterion_rows(selected, criteria)
    best = (
        scores.assign(cost=ranking_cost(scores["mean"], scores["higher_is_better"]))
        .sort_values(["cost", "order"])
        .drop_duplicates(keys)
    )
    only = rows[[*keys, "order"]].drop_duplicates().drop_duplicates(keys, keep=False)
    return pd.concat([best[[*keys, "order"]], only], ignore_index=True).drop_duplicates()
