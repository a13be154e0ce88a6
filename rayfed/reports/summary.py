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
from rayfed.core.round_record import POINTS, is_fraction
from rayfed.reports.choice import BY_SEED, chosen_groups
from rayfed.reports.groups import LEFT_OUT
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, pick_rounds

SCORE = ["unseen", "point", "split", "metric", "higher_is_better", "rule", "quantity"]
_IN_ROUND = ["unseen", "point", "split", "metric", "higher_is_better", "quantity", "round"]
DEFAULT_SPLITS = ("test", "ood", "val", "train")
"""The order in which splits are tried for a default; some data have no test split."""

RULE_CAPTIONS = {
    "final": "at the last evaluated round",
    "selected": "at the round with the best mean validation {criterion}",
    "oracle": "ORACLE: at the best round on this very split, which no honest protocol can know",
    "best5": "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle would",
}


NOT_SCORED = (
    "no model was scored; clients need test or validation data (partition.test, partition.validation), which "
    "evaluate.splits names"
)


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
    tie; see `rayfed.reports.choice`. The choice holds for all metrics. Test values never choose: without validation
    values, only an algorithm with a single group of trials has a choice. `chosen_by_default` marks, in the rows of
    every point, the choice for tables that show each group of trials at its own point (`Tables.points_to_show`).
    """
    done = tables.done
    criteria = tables.criteria
    curves = tables.curves.merge(done[TRIAL].drop_duplicates(), on=TRIAL)
    rows = _over_seeds(pick_rounds(curves, criteria), done, SCORE)
    over_rounds = _over_seeds(curves, done, _IN_ROUND)

    at_each_point = chosen_groups(rows, done, ["experiment", "algorithm", "point"], criteria)
    shown = at_default_points(rows, tables.points_to_show)
    by_default = chosen_groups(shown, done, ["experiment", "algorithm"], criteria)
    rows = _with_marks(rows, at_each_point, by_default)
    over_rounds = _with_marks(over_rounds, at_each_point, by_default)
    return Summary(rows, over_rounds, tables.notes)


def _with_marks(rows: pd.DataFrame, at_each_point: pd.DataFrame, by_default: pd.DataFrame) -> pd.DataFrame:
    rows = _with_mark(rows, at_each_point, "chosen")
    return _with_mark(rows, by_default, "chosen_by_default")


def _with_mark(rows: pd.DataFrame, choice: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return `rows` with a column `name` that says whether `choice` has their experiment, order and, if any, point."""
    choice = choice.drop(columns="algorithm")
    keys = list(choice)
    marks = choice.assign(**{name: True})
    marked = rows.merge(marks, on=keys, how="left")
    marked[name] = marked[name].eq(True)
    return marked


def out_of_domain_points(rows: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Return the point to show on the split "ood" by (experiment, order): global, or else downloaded."""
    present = rows[(rows["split"] == "ood") & ~rows["unseen"]]
    points = {}
    for (experiment, order), group in present.groupby(["experiment", "order"]):
        point = min(group["point"].unique(), key=POINTS.index)
        points[str(experiment), int(order)] = point
    return points


def at_default_points(rows: pd.DataFrame, points: Mapping[tuple[str, int], str]) -> pd.DataFrame:
    """Return the `rows` (experiment, order, point, ...) at the point that `points` gives for their group."""
    groups = zip(rows["experiment"], rows["order"], strict=True)
    shown = pd.Series([points.get(group) for group in groups], index=rows.index, dtype=object)
    return rows[rows["point"] == shown]


def seed_values(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return one value per seed: columns experiment, order, seed, `by` (with metric and quantity), value.

    If the trials of a seed leave out one domain each, the value is their mean, or the worst of them for `worst`.
    """
    rows = values.merge(trials[[*TRIAL, "order", "seed"]], on=TRIAL)
    keys = ["experiment", "order", "seed", *by]
    groups = rows.groupby(keys)["value"].agg(["mean", "min", "max"]).reset_index()
    worst = groups["min"].where(groups["higher_is_better"], groups["max"])
    groups["value"] = worst.where(groups["quantity"] == "worst", groups["mean"])
    return groups.drop(columns=["mean", "min", "max"])


def _over_seeds(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    group = ["experiment", "order"]
    of_each_seed = seed_values(values, trials, by)
    of_seeds = of_each_seed.groupby([*group, *by])["value"]
    statistics = of_seeds.agg(mean="mean", sd="std", seeds="count").reset_index()  # pandas divides by n - 1
    described = trials.drop(columns=["trial", "seed", "status", "started", LEFT_OUT]).drop_duplicates(group)
    is_by_seed = described["hyperparameters"] == BY_SEED
    keys = []
    for name in described:
        if name not in (*group, "algorithm", "hyperparameters"):
            keys.append(name)
    described[keys] = described[keys].astype(object).mask(is_by_seed, None)
    merged = described.merge(statistics, on=group)
    return merged.sort_values([*group, *by], ignore_index=True)


def nothing_to_show(tables: Tables) -> str:
    """Return a sentence on why there is no table of results."""
    done = tables.done
    if done.empty:
        return "No trial is done yet."
    are_done = f"{len(done)} trials are done"
    if len(done) == 1:
        are_done = "1 trial is done"
    counts = tables.counts.merge(done[TRIAL], on=TRIAL)
    if counts.empty:
        return f"{are_done}, and {NOT_SCORED}."
    if (counts["missing"] < counts["values"]).any():
        return f"{are_done}, and no table can show their values."
    names = ", ".join(sorted(counts["metric"].unique()))
    return f"{are_done}, and all values of their metrics are NaN ({names})."


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
        chosen: Whether only the hyperparameters that validation chose are shown.
    """

    metric: str | None = None
    point: str | None = None
    split: str | None = None
    rule: str | None = None
    select: str | None = None
    chosen: bool = False


DEFAULT_VIEW = View()


def filter_rows(rows: pd.DataFrame, tables: Tables, view: View) -> pd.DataFrame:
    """Return the participants' rows of the metric, the point and the split of `view`, under all rules.

    `rows` summarise `tables`: columns experiment, algorithm, order, unseen, point, split, metric, and more. If `view`
    has no point, `chosen_by_default` becomes `chosen`, where there is such a column.

    Raises:
        UsageError: There are no such rows.
    """
    rows = rows[~rows["unseen"]]
    of_ood = out_of_domain_points(rows)
    rows = _with_value(rows, "metric", view.metric)
    rows = _with_value(rows, "split", view.split)
    if view.metric is None:
        rows = rows[rows["metric"] == rows["experiment"].map(tables.criteria)]
    if view.point is None and "chosen_by_default" in rows:
        rows = rows.assign(chosen=rows["chosen_by_default"])
    points = _points_of_rows(rows, tables, view, of_ood)
    at_point = rows[rows["point"] == points]
    if at_point.empty:
        raise _no_rows(rows, tables, view, points)
    if view.chosen and "chosen" in at_point:
        at_point = without_rejected(at_point)
    if view.split is not None:
        return at_point
    rank = at_point["split"].map(DEFAULT_SPLITS.index)
    first = rank.groupby(at_point["experiment"]).transform("min")
    return at_point[rank == first]


def without_rejected(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the `rows` that validation chose, and all rows of algorithms without a chosen one."""
    has_choice = rows.groupby(["experiment", "algorithm"])["chosen"].transform("any")
    return rows[rows["chosen"] | ~has_choice]


def _with_value(rows: pd.DataFrame, column: str, value: str | None) -> pd.DataFrame:
    """Return the `rows` with `value` in a column, or all of them if it is None."""
    if value is None:
        return rows
    known = sorted(set(rows[column]))
    if value not in known:
        raise UsageError(f"{column}={value}: {suggestion(value, known)}")
    return rows[rows[column] == value]


def _points_of_rows(rows: pd.DataFrame, tables: Tables, view: View, of_ood: Mapping[tuple[str, int], str]) -> pd.Series:
    """Return the point at which each row's group is shown on the row's split."""
    if view.point is not None:
        return pd.Series(view.point, index=rows.index)
    by_default = tables.points_to_show
    points = []
    keys = zip(rows["experiment"], rows["order"], rows["split"], strict=True)
    for experiment, order, split in keys:
        if split == "ood":
            of_split = of_ood
        else:
            of_split = by_default
        points.append(of_split[experiment, order])
    return pd.Series(points, index=rows.index, dtype=object)


def _no_rows(rows: pd.DataFrame, tables: Tables, view: View, points: pd.Series) -> UsageError:
    metric = view.metric or "/".join(sorted(set(tables.criteria.values())))
    what = " ".join(filter(None, [view.split, metric]))
    point = view.point or "/".join(sorted(set(points)))
    known = ", ".join(sorted(set(rows["point"])))
    return UsageError(f"point={point}: no {what} there; known: {known}")


def rows_of_rule(rows: pd.DataFrame, rule: str | None) -> tuple[pd.DataFrame, str]:
    """Return the rows of `rule`, or of the default rule, and the rule.

    Raises:
        UsageError: There are no such rows.
    """
    groups = {}
    for name, means in rows[rows["quantity"] == "mean"].groupby("rule"):
        pairs = zip(means["order"], means["seeds"], strict=True)
        groups[str(name)] = set(pairs)
    if rule is None:
        rule = "final"
        if groups.get("selected") == groups["final"]:
            rule = "selected"
    if rule not in groups:
        why = ""
        if rule == "selected":
            why = "; without validation scores in the round that selected picks, use final"
        raise UsageError(f"rule={rule}: {suggestion(rule, groups)}{why}")
    return rows[rows["rule"] == rule], rule


def unit(metric: str) -> str:
    """Return ", %" for metrics that are shown in percent."""
    if is_fraction(metric):
        return ", %"
    return ""


def average_words(counts: pd.DataFrame, trials: pd.DataFrame, split: str, metric: str) -> str:
    """Return in words what a mean of `metric` on `split` is over: clients, or the server's values.

    `counts` (see `count_scores`) and `trials` belong to one experiment.
    """
    if is_of_server(counts, split, metric):
        return "mean over the server's values"
    return f"mean over {_clients_scored(trials) or 'clients'}"


def is_of_server(counts: pd.DataFrame, split: str, metric: str) -> bool:
    """Return whether no client has a value of `metric` on `split`; `counts` belong to one experiment."""
    shown = (counts["split"] == split) & (counts["metric"] == metric)
    return bool(counts.loc[shown, "clients"].eq(0).all())


def mean_caption(trials: pd.DataFrame) -> str:
    """Return what numbers are means over: "mean ± sd over 3 seeds, 3 partitions", or "1 seed, 1 partition"."""
    seeds = sorted(trials.groupby("order")["seed"].nunique().unique())
    words = [range_words(seeds, "seed")]
    if seeds != [1]:
        words = [f"mean ± sd over {words[0]}"]
    if trials["partition_hash"].notna().all():
        per_domain = trials.groupby(["order", LEFT_OUT])["partition_hash"].nunique()
        words.append(range_words(sorted(per_domain.unique()), "partition"))
    words.append(_clients_scored(trials))
    return ", ".join(filter(None, words))


def _clients_scored(trials: pd.DataFrame) -> str:
    """Return "a fixed sample of 1000 clients" if not all clients were scored, else ""."""
    sizes = sorted(set(trials["clients_scored"].dropna().astype(int)))
    if not sizes:
        return ""
    return f"a fixed sample of {range_words(sizes, 'client')}"


def range_words(numbers: list[int], noun: str) -> str:
    """Return "3 seeds", or "1 to 3 seeds" if the sorted `numbers` differ."""
    if numbers == [1]:
        return f"1 {noun}"
    if len(numbers) == 1:
        return f"{numbers[0]} {noun}s"
    return f"{numbers[0]} to {numbers[-1]} {noun}s"


def coverage_words(counts: pd.DataFrame, split: str, metric: str) -> str:
    """Return "3 of 4 clients" if a metric has no value at clients that have another score; else an empty string.

    `counts` are those of `count_scores`, of one experiment.
    """
    on_split = counts[(counts["split"] == split) & (counts["clients"] > 0)]
    defined = on_split["clients"] - on_split["missing"]
    places = []
    for name in (*TRIAL, "point", "round"):
        places.append(on_split[name])
    most = defined.groupby(places).transform("max")
    lacks = (on_split["metric"] == metric) & (defined < most)
    if not lacks.any():
        return ""
    fewest = sorted(set(defined[on_split["metric"] == metric]))
    all_clients = int(most[lacks].max())
    return f"{_span(fewest)} of {all_clients} clients"


def _span(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    return f"{numbers[0]} to {numbers[-1]}"


def score_notes(counts: pd.DataFrame, rows: pd.DataFrame, rule: str) -> list[str]:
    """Return notes on NaN values among the shown `rows`, and on rounds that `rule` cannot compare fairly."""
    scores = _shown(counts, rows)
    notes = []
    for (experiment, split, metric), group in scores.groupby(["experiment", "split", "metric"]):
        values = group["values"].sum()
        missing = group["missing"].sum()
        if missing:
            lacks = group["missing"] > 0
            algorithms = sorted(group.loc[lacks, "algorithm"].unique())
            share = f"{missing} of {values} values of {split} {metric}"
            notes.append(
                f"{experiment}: {share} are NaN (of {', '.join(algorithms)}). Means leave them out, and rounds in "
                "which there is no other value do not count as evaluated."
            )
    if rule != "final":
        notes += scored_clients_notes(counts, rows)
    return notes


def scored_clients_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note on each experiment in which the scored clients differ between rounds; see `score_notes`."""
    scores = _shown(counts, rows)
    of_clients = scores[scores["cohort"] != 0]
    cohorts = of_clients.groupby([*TRIAL, "point", "split", "metric"])["cohort"].nunique()
    different = cohorts[cohorts > 1].index.get_level_values("experiment")
    notes = []
    for name in sorted(different.unique()):
        notes.append(
            f"{name}: rounds were scored on different clients (evaluate.clients=selected, or the point trained), so a "
            "rule that compares rounds also compares clients; --rule final does not."
        )
    return notes


def _shown(counts: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of the participants' scores that `rows` summarise."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    of_participants = counts[~counts["unseen"]]
    return of_participants.merge(rows[keys].drop_duplicates(), on=keys)
