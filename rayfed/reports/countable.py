"""Which trials count in a report, and what the reader should know of the others."""

from collections.abc import Mapping

import pandas as pd

from rayfed.records.trials import STATUSES
from rayfed.reports.common_rounds import evaluation_interval_notes
from rayfed.reports.hyperparameter_groups import LEFT_OUT
from rayfed.reports.selection import TRIAL

_MOST_REASONS = 5  # for early stops that a report gives one by one


def countable_trials(
    trials: pd.DataFrame, groups: pd.DataFrame, counts: pd.DataFrame, criteria: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials that count, in the columns of `group_trials`, and a note on each kind of trial that does not.

    One trial counts for each group and seed (and left-out domain): the last one that is done. The arguments are as in
    `Tables`.
    """
    notes = []
    unfinished = {status: int((groups["status"] == status).sum()) for status in STATUSES if status != "done"}
    if any(unfinished.values()):
        words = ", ".join(f"{count} {status}" for status, count in unfinished.items() if count)
        notes.append(f"{sum(unfinished.values())} of {len(groups)} trials are not done and do not count: {words}.")
    notes += _early_stops(trials)
    done = groups[groups["status"] == "done"].sort_values(["started", "trial"])
    once = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    if repeated := len(done) - len(once):
        words = "1 trial does" if repeated == 1 else f"{repeated} trials do"
        notes.append(f"{words} not count, because a later one has the same hyperparameters and seed.")
    notes += [*_criterion_notes(trials, criteria), *_code_notes(once, trials)]
    notes += evaluation_interval_notes(trials.merge(once[TRIAL], on=TRIAL))
    for experiment, leave_one_out in once[once[LEFT_OUT] != ""].groupby("experiment"):
        pairs = leave_one_out["seed"].nunique() * leave_one_out[LEFT_OUT].nunique()
        for (algorithm, hyperparameters), group in leave_one_out.groupby(["algorithm", "hyperparameters"]):
            if len(group) < pairs:
                name = " ".join(filter(None, [experiment, algorithm, hyperparameters]))
                notes.append(f"{name}: means are over {len(group)} of {pairs} pairs of seed and left-out domain.")
    unknown = counts[TRIAL].drop_duplicates().merge(trials[TRIAL], on=TRIAL, how="left", indicator=True)
    if count := int((unknown["_merge"] == "left_only").sum()):
        words = "1 trial in metrics has" if count == 1 else f"{count} trials in metrics have"
        notes.append(f"{words} no row in trials and {'does' if count == 1 else 'do'} not count.")
    return once, notes


def _criterion_notes(trials: pd.DataFrame, criteria: Mapping[str, str]) -> list[str]:
    """Return a note on each experiment whose trials were to be chosen by different metrics."""
    named = trials.dropna(subset="selection_metric").groupby("experiment")["selection_metric"].unique()
    return [
        f"{experiment}: trials differ in select.metric ({', '.join(sorted(metrics))}); rounds and hyperparameters are "
        f"chosen by {criteria[str(experiment)]}; --select METRIC chooses by another."
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
