"""Mean and standard deviation over seeds for each algorithm and its hyperparameters, and the choice by validation."""

from collections.abc import Mapping
from typing import NamedTuple

import pandas as pd

from rayfed.core.records import POINTS
from rayfed.records.metric_names import ranking_cost
from rayfed.records.trials import STATUSES
from rayfed.reports.common_rounds import evaluation_interval_notes
from rayfed.reports.hyperparameter_groups import LEFT_OUT
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, criterion_rows, pick_rounds

_MOST_REASONS = 5  # for early stops that a report gives one by one
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
    its own point (see `points_to_show`), in the rows of every point.
    """
    done, notes = countable_trials(tables)
    curves = tables.curves.merge(done[TRIAL], on=TRIAL)
    rows = _over_seeds(pick_rounds(curves, tables.criteria), done, SCORE)
    chosen = (
        _chosen(rows, ["experiment", "algorithm", "point"], tables.criteria)
        .drop(columns="algorithm")
        .assign(chosen=True)
    )
    shown = at_default_points(rows, points_to_show(tables))
    by_default = _chosen(shown, ["experiment", "algorithm"], tables.criteria)
    by_default = by_default.drop(columns="algorithm").assign(chosen_by_default=True)
    over_rounds = _over_seeds(curves, done, [*[name for name in SCORE if name != "rule"], "round"])
    rows, over_rounds = (
        frame.merge(chosen, on=["experiment", "order", "point"], how="left")
        .merge(by_default, on=["experiment", "order"], how="left")
        .assign(**{name: lambda merged, name=name: merged[name].eq(True) for name in ("chosen", "chosen_by_default")})
        for frame in (rows, over_rounds)
    )
    return Summary(rows, over_rounds, notes)


def points_to_show(tables: Tables) -> dict[tuple[str, int], str]:
    """Return the point to show by (experiment, order).

    It is the one at which the algorithm's paper evaluates (`default_eval_point` in `trials`), otherwise the first. It
    may differ between hyperparameters: DBE without its bias is scored as a global model.
    """
    groups = tables.groups.sort_values(["started", "trial"], kind="stable")[[*TRIAL, "order"]]
    present = tables.counts[~tables.counts["unseen"]].drop_duplicates([*TRIAL, "point"]).merge(groups, on=TRIAL)
    points: dict[tuple[str, int], str] = {}
    for (experiment, order), group in present.groupby(["experiment", "order"]):
        points[str(experiment), int(order)] = min(group["point"], key=POINTS.index)
    declared = groups.merge(tables.trials[[*TRIAL, "default_eval_point"]], on=TRIAL).dropna()
    for experiment, order, point in zip(
        declared["experiment"], declared["order"], declared["default_eval_point"], strict=True
    ):
        points[experiment, order] = point
    return points


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


def countable_trials(tables: Tables) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials that count, in the columns of `group_trials`, and a note on each kind of trial that does not.

    One trial counts for each group and seed (and left-out domain): the last one that is done.
    """
    trials, notes = tables.groups, []
    unfinished = {status: int((trials["status"] == status).sum()) for status in STATUSES if status != "done"}
    if any(unfinished.values()):
        words = ", ".join(f"{count} {status}" for status, count in unfinished.items() if count)
        notes.append(f"{sum(unfinished.values())} of {len(trials)} trials are not done and do not count: {words}.")
    notes += _early_stops(tables.trials)
    done = trials[trials["status"] == "done"].sort_values(["started", "trial"])
    once = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    if repeated := len(done) - len(once):
        words = "1 trial does" if repeated == 1 else f"{repeated} trials do"
        notes.append(f"{words} not count, because a later one has the same hyperparameters and seed.")
    notes += [*_criterion_notes(tables), *_code_notes(once, tables.trials)]
    notes += evaluation_interval_notes(tables.trials.merge(once[TRIAL], on=TRIAL))
    for experiment, leave_one_out in once[once[LEFT_OUT] != ""].groupby("experiment"):
        pairs = leave_one_out["seed"].nunique() * leave_one_out[LEFT_OUT].nunique()
        for (algorithm, hyperparameters), group in leave_one_out.groupby(["algorithm", "hyperparameters"]):
            if len(group) < pairs:
                name = " ".join(filter(None, [experiment, algorithm, hyperparameters]))
                notes.append(f"{name}: means are over {len(group)} of {pairs} pairs of seed and left-out domain.")
    unknown = tables.counts[TRIAL].drop_duplicates().merge(tables.trials[TRIAL], on=TRIAL, how="left", indicator=True)
    if count := int((unknown["_merge"] == "left_only").sum()):
        words = "1 trial in metrics has" if count == 1 else f"{count} trials in metrics have"
        notes.append(f"{words} no row in trials and {'does' if count == 1 else 'do'} not count.")
    return once, notes


def _criterion_notes(tables: Tables) -> list[str]:
    """Return a note on each experiment whose trials were to be chosen by different metrics."""
    named = tables.trials.dropna(subset="selection_metric").groupby("experiment")["selection_metric"].unique()
    return [
        f"{experiment}: trials differ in select.metric ({', '.join(sorted(metrics))}); rounds and hyperparameters are "
        f"chosen by {tables.criteria[str(experiment)]}; --select METRIC chooses by another."
        for experiment, metrics in named.items()
        if len(metrics) > 1
    ]


def _code_notes(done: pd.DataFrame, trials: pd.DataFrame) -> list[str]:
    """Return a note on each group of trials that ran with different code of the user's own."""
    if "code_hash" not in trials:
        return []
    notes = []
    hashed = done.merge(trials[[*TRIAL, "code_hash"]], on=TRIAL).dropna(subset=["code_hash"])
    for (experiment, _), group in hashed.groupby(["experiment", "order"]):
        if group["code_hash"].nunique() > 1:
            first = group.iloc[0]
            name = " ".join(filter(None, [experiment, first["algorithm"], first["hyperparameters"]]))
            seeds = [
                f"{digest} at seed{'s' * (of_code['seed'].nunique() > 1)} "
                f"{', '.join(map(str, sorted(of_code['seed'].unique())))}"
                for digest, of_code in group.groupby("code_hash")
            ]
            notes.append(f"{name}: your own code has changed between seeds (code_hash {'; '.join(seeds)}).")
    return notes


def _early_stops(trials: pd.DataFrame) -> list[str]:
    """Return a note on the trials that stopped early, on each with its reason if there are few."""
    if "stop_reason" not in trials or not (stopped := trials[trials["stop_reason"].notna()]).size:
        return []
    lines = [
        f"{row['trial']} stopped early, after round {int(row['rounds_done'])} of {int(row['rounds'])}: "
        f"{row['stop_reason']}."
        for row in stopped.head(_MOST_REASONS).to_dict("records")
    ]
    if len(stopped) > _MOST_REASONS:
        more = len(stopped) - _MOST_REASONS
        lines.append(f"{more} more trials stopped early; trials.stop_reason says why.")
    return lines


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
