"""Mean and standard deviation over seeds for each algorithm and its hyperparameters, and the choice by validation.

Tables, charts and the page show a part of these statistics, a `View`. The words beside the numbers are here, too:
rules, units, what means are over, and notes on the scores.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.records import POINTS, is_fraction
from rayfed.reports.read import Tables
from rayfed.reports.selection import LEFT_OUT, TRIAL, criterion_rows, pick_rounds, ranking_cost

SCORE = ["unseen", "point", "split", "metric", "higher_is_better", "rule", "quantity"]
DEFAULT_SPLITS = ("test", "ood", "val", "train")
"""The order in which splits are tried for a default; some data have no test split."""

RULE_CAPTIONS = {
    "final": "at the last evaluated round",
    "selected": "at the round with the best mean validation {criterion}",
    "oracle": "ORACLE: at the best round on this very split, which no honest protocol can know",
    "best5": "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle would",
}


class Summary(NamedTuple):
    """Statistics over seeds.

    Columns of `rows` and `curves`: experiment, algorithm, hyperparameters, order, unseen, point, split, metric,
    higher_is_better, (rule | round), quantity, `mean`, `sd` (ddof=1, NaN for one seed), `seeds` (their number),
    `chosen`, `chosen_by_default`, and the hyperparameters that vary.

    Attributes:
        rows: One row per group of trials and score, under each rule.
        curves: The same, in each round in place of each rule.
        notes: Sentences on what the reader should know.
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    notes: list[str]


def summarise(tables: Tables) -> Summary:
    """Return means over seeds of the trials that are done; the notes count the other trials.

    For each algorithm and point, `chosen` marks the hyperparameters whose validation values are best: by the metric
    that chooses in the experiment, at the round that `selected` picks, as a mean over seeds, and the first ones on a
    tie. The choice holds for all metrics. Test values never choose: without validation values, only an algorithm with
    a single group of trials has a choice. `chosen_by_default` marks, in the rows of every point, the choice for tables
    that show each group of trials at its own point (`Tables.points_to_show`).
    """
    done, criteria = tables.done, tables.criteria
    curves = tables.curves.merge(done[TRIAL], on=TRIAL)
    rows = _over_seeds(pick_rounds(curves, criteria), done, SCORE)
    over_rounds = _over_seeds(curves, done, [*[name for name in SCORE if name != "rule"], "round"])
    shown = at_default_points(rows, tables.points_to_show)
    for name, scored, keys in (("chosen", rows, ["point"]), ("chosen_by_default", shown, [])):
        choice = _chosen(scored, ["experiment", "algorithm", *keys], criteria).drop(columns="algorithm")
        rows, over_rounds = (
            frame.merge(choice.assign(**{name: True}), on=["experiment", "order", *keys], how="left").assign(
                **{name: lambda merged, name=name: merged[name].eq(True)}
            )
            for frame in (rows, over_rounds)
        )
    return Summary(rows, over_rounds, tables.notes)


def out_of_domain_points(rows: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Return the point to show on the split "ood" by (experiment, order): global, or else downloaded."""
    present = rows[(rows["split"] == "ood") & ~rows["unseen"]].drop_duplicates(["experiment", "order", "point"])
    return {
        (str(experiment), int(order)): min(group["point"], key=POINTS.index)
        for (experiment, order), group in present.groupby(["experiment", "order"])
    }


def at_default_points(rows: pd.DataFrame, points: Mapping[tuple[str, int], str]) -> pd.DataFrame:
    """Return the `rows` (experiment, order, point, ...) at the point that `points` gives for their group."""
    shown = [points.get(key) for key in zip(rows["experiment"], rows["order"], strict=True)]
    return rows[rows["point"] == pd.Series(shown, index=rows.index, dtype=object)]


def seed_values(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return one value per seed: columns experiment, order, seed, `by` (with metric and quantity), value.

    If the trials of a seed leave out one domain each, the value is their mean, or the worst of them for `worst`.
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
    """Return, for each value of `keys`, the `order` of the group of trials that validation prefers."""
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


@dataclass(frozen=True)
class View:
    """The part of the results that is shown; None stands for a default.

    Attributes:
        metric: By default, in each experiment, the metric that chooses (`Tables.criteria`).
        point: The model scored: by default the point at which each algorithm's paper evaluates, and on the split "ood"
            the global model, or the downloaded models where there is no global model.
        split: By default, in each experiment, the first of test, ood, val and train that has values.
        rule: The rule that picks the round: by default `selected` if every trial has a value in the round that
            validation picks, and else `final`.
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

    `rows` summarise `tables`: columns experiment, algorithm, order, unseen, point, split, metric, and more. If `view`
    has no point, `chosen_by_default` becomes `chosen`, where there is such a column.

    Raises:
        UsageError: There are no such rows.
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
        UsageError: There are no such rows.
    """
    means = rows[rows["quantity"] == "mean"]
    groups = {name: set(zip(group["order"], group["seeds"], strict=True)) for name, group in means.groupby("rule")}
    if rule is None:
        rule = "selected" if groups.get("selected") == groups["final"] else "final"
    if rule not in groups:
        why = "; without validation scores in the round that selected picks, use final" if rule == "selected" else ""
        raise UsageError(f"rule={rule}: {suggestion(rule, groups)}{why}")
    return rows[rows["rule"] == rule], rule


def unit(metric: str) -> str:
    """Return ", %" for metrics that are shown in percent."""
    return ", %" if is_fraction(metric) else ""


def average_words(counts: pd.DataFrame, trials: pd.DataFrame, split: str, metric: str) -> str:
    """Return in words what a mean of `metric` on `split` is over: clients, or the server's values.

    `counts` (see `count_scores`) and `trials` belong to one experiment.
    """
    if is_of_server(counts, split, metric):
        return "mean over the server's values"
    return f"mean over {_clients_scored(trials) or 'clients'}"


def is_of_server(counts: pd.DataFrame, split: str, metric: str) -> bool:
    """Return whether no client has a value of `metric` on `split`; `counts` belong to one experiment."""
    clients = counts.loc[(counts["split"] == split) & (counts["metric"] == metric), "clients"]
    return bool(clients.eq(0).all())


def mean_caption(trials: pd.DataFrame) -> str:
    """Return what numbers are means over: "mean ± sd over 3 seeds, 3 partitions", or "1 seed, 1 partition"."""
    seeds = sorted(trials.groupby("order")["seed"].nunique().unique())
    words = range_words(seeds, "seed") if seeds == [1] else f"mean ± sd over {range_words(seeds, 'seed')}"
    if trials["partition_hash"].notna().all():
        per_domain = trials.groupby(["order", LEFT_OUT])["partition_hash"].nunique()
        words += f", {range_words(sorted(per_domain.unique()), 'partition')}"
    return ", ".join(filter(None, [words, _clients_scored(trials)]))


def _clients_scored(trials: pd.DataFrame) -> str:
    """Return "a fixed sample of 1000 clients" if not all clients were scored, else ""."""
    sizes = sorted({int(size) for size in trials["clients_scored"].dropna()})
    return f"a fixed sample of {range_words(sizes, 'client')}" if sizes else ""


def range_words(numbers: list[int], noun: str) -> str:
    """Return "3 seeds", or "1 to 3 seeds" if the sorted `numbers` differ."""
    if len(numbers) == 1:
        return f"{numbers[0]} {noun}{'' if numbers[0] == 1 else 's'}"
    return f"{numbers[0]} to {numbers[-1]} {noun}s"


def score_notes(counts: pd.DataFrame, rows: pd.DataFrame, rule: str) -> list[str]:
    """Return notes on NaN values among the shown `rows`, and on rounds that `rule` cannot compare fairly."""
    scores, notes = _shown(counts, rows), []
    for (experiment, split, metric), group in scores.groupby(["experiment", "split", "metric"]):
        values, missing = group["values"].sum(), group["missing"].sum()
        if missing:
            algorithms = ", ".join(sorted(group.loc[group["missing"] > 0, "algorithm"].unique()))
            notes.append(
                f"{experiment}: {missing} of {values} values of {split} {metric} are NaN (of {algorithms}). Means "
                "leave them out, and rounds in which there is no other value do not count as evaluated."
            )
    if rule != "final":
        notes += scored_clients_notes(counts, rows)
    return notes


def scored_clients_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note on each experiment in which the scored clients differ between rounds; see `score_notes`."""
    scores = _shown(counts, rows)
    cohorts = scores[scores["cohort"] != 0].groupby([*TRIAL, "point", "split", "metric"])["cohort"].nunique()
    different = cohorts[cohorts > 1].index.get_level_values("experiment")
    return [
        f"{name}: rounds were scored on different clients (evaluate.clients=selected, or the point trained), so a rule "
        "that compares rounds also compares clients; --rule final does not."
        for name in sorted(different.unique())
    ]


def _shown(counts: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of the participants' scores that `rows` summarise."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    return counts[~counts["unseen"]].merge(rows[keys].drop_duplicates(), on=keys)
