"""Mean and spread over seeds of each setting, and which setting of an algorithm validation chooses."""

from typing import NamedTuple

import pandas as pd

from rayfed.results.common_rounds import rounds_differ
from rayfed.results.hyperparameter_groups import LEFT_OUT, settings
from rayfed.results.metric_names import badness, lower_are_better
from rayfed.results.read import Tables
from rayfed.results.selection import CRITERIA, TRIAL, by_round, of_criterion, picked
from rayfed.results.tables import POINTS
from rayfed.results.trials import STATUSES

SCORE = ["unseen", "point", "split", "metric", "rule", "quantity"]


class Summary(NamedTuple):
    """`rows`: a line a setting and score; `curves`: the same without `rule`, a line a round; `notes`: what to say.

    Columns of both: experiment, algorithm, setting, order, unseen client, point, split, metric, (rule | round), quantity,
    `mean`, `sd` (ddof=1, NaN for one seed), `seeds` (how many), `chosen`, and the hyperparameters that vary.
    """

    rows: pd.DataFrame
    curves: pd.DataFrame
    notes: list[str]


def summarise(tables: Tables) -> Summary:
    """Means over seeds of the trials that are done; the others are counted in the notes.

    `chosen` marks, for each algorithm and point, the setting with the best mean over seeds of its validation accuracy
    (loss, where there is none) at the round that `selected` picks (the first of equals): one setting for all metrics.
    Without a validation split no setting is chosen, unless it is the algorithm's only one. Test values never choose.
    """
    done, notes = counted(tables)
    curves = by_round(tables.metrics.merge(done[TRIAL], on=TRIAL))
    rows = _over_seeds(picked(curves), done, SCORE)
    chosen = _chosen(rows)
    over_rounds = _over_seeds(curves, done, [*[name for name in SCORE if name != "rule"], "round"])
    first, then = (
        frame.merge(chosen, on=["experiment", "order", "point"], how="left")
        .fillna({"chosen": False})
        .astype({"chosen": bool})
        for frame in (rows, over_rounds)
    )
    return Summary(first, then, notes)


def criterion(rows: pd.DataFrame) -> str:
    """The metric whose validation values choose among the rounds and settings of one experiment's `rows`."""
    judged = of_criterion(rows[~rows["unseen"]], ["experiment"])
    return CRITERIA[0] if judged.empty else str(judged["metric"].iloc[0])


def points_to_show(tables: Tables) -> dict[tuple[str, str], str]:
    """(experiment, algorithm) -> the point that the algorithm's paper scores (`scored` in `trials`), else the first."""
    trained = tables.metrics[~tables.metrics["unseen"]]
    present = trained[["experiment", "algorithm", "point"]].drop_duplicates()
    points = {}
    for (experiment, algorithm), group in present.groupby(["experiment", "algorithm"]):
        points[experiment, algorithm] = min(group["point"], key=POINTS.index)
    declared = tables.trials.dropna(subset=["default_eval_point"])
    for experiment, algorithm, point in zip(
        declared["experiment"], declared["algorithm"], declared["default_eval_point"], strict=True
    ):
        points[experiment, algorithm] = point
    return points


def counted(tables: Tables) -> tuple[pd.DataFrame, list[str]]:
    """The trials that count, one a setting and seed (and left-out domain), as `settings` has them, and a line on each
    kind that does not."""
    trials, notes = settings(tables.trials), []
    left_out = {status: int((trials["status"] == status).sum()) for status in STATUSES if status != "done"}
    if any(left_out.values()):
        words = ", ".join(f"{count} {status}" for status, count in left_out.items() if count)
        notes.append(f"{sum(left_out.values())} of {len(trials)} trials do not count, because not done: {words}.")
    done = trials[trials["status"] == "done"].sort_values(["started", "trial"])
    once = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    if len(once) < len(done):
        again = len(done) - len(once)
        words = "1 trial repeats" if again == 1 else f"{again} trials repeat"
        notes.append(f"{words} the setting and seed of a later one and {'does' if again == 1 else 'do'} not count.")
    notes += rounds_differ(tables.trials.merge(once[TRIAL], on=TRIAL))
    for experiment, of_one in once[once[LEFT_OUT] != ""].groupby("experiment"):
        pairs = of_one["seed"].nunique() * of_one[LEFT_OUT].nunique()
        for (algorithm, setting), group in of_one.groupby(["algorithm", "setting"]):
            if len(group) < pairs:
                name = " ".join(filter(None, [experiment, algorithm, setting]))
                notes.append(f"{name}: means are over {len(group)} of {pairs} pairs of seed and left-out domain.")
    unknown = tables.metrics[TRIAL].drop_duplicates().merge(tables.trials[TRIAL], on=TRIAL, how="left", indicator=True)
    if count := int((unknown["_merge"] == "left_only").sum()):
        words = "1 trial in metrics has" if count == 1 else f"{count} trials in metrics have"
        notes.append(f"{words} no row in trials and {'does' if count == 1 else 'do'} not count.")
    return once, notes


def of_seeds(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Columns experiment, order, seed, `by`, value: of a seed's trials that left out a domain each, their mean, and the
    worst of `worst`; of its only trial, the value."""
    rows = values.merge(trials[[*TRIAL, "order", "seed"]], on=TRIAL)
    groups = rows.groupby(["experiment", "order", "seed", *by])["value"].agg(["mean", "min", "max"]).reset_index()
    low = lower_are_better(groups["metric"])
    worst = groups["max"].where(low, groups["min"])
    value = worst.where(groups["quantity"] == "worst", groups["mean"])
    return groups.drop(columns=["mean", "min", "max"]).assign(value=value)


def _over_seeds(values: pd.DataFrame, trials: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    setting = ["experiment", "order"]
    grouped = of_seeds(values, trials, by).groupby([*setting, *by])["value"]
    result = grouped.agg(mean="mean", sd="std", seeds="count").reset_index()  # pandas divides by n - 1
    described = trials.drop(columns=["trial", "seed", "status", "started", LEFT_OUT]).drop_duplicates(setting)
    return described.merge(result, on=setting).sort_values([*setting, *by], ignore_index=True)


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    keys = ["experiment", "algorithm", "point"]
    trained = rows[~rows["unseen"]]
    scores = of_criterion(trained[(trained["rule"] == "selected") & (trained["quantity"] == "mean")], keys)
    best = (
        scores.assign(badness=badness(scores["mean"], scores["metric"]))
        .sort_values(["badness", "order"])
        .drop_duplicates(keys)
    )
    only = rows[[*keys, "order"]].drop_duplicates().drop_duplicates(keys, keep=False)
    marks = pd.concat([best[[*keys, "order"]], only], ignore_index=True).drop_duplicates()
    return marks.drop(columns="algorithm").assign(chosen=True)
