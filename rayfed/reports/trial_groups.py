"""Groups of trials that differ only in the seed or the domain left out, and the trials that count."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from rayfed.records.trials import FIXED, STATUSES
from rayfed.reports.selection import TRIAL

LOCATION_KEYS = ("data.root", "data.download")
"""Keys that say where a dataset's files are and how they got there; the same files elsewhere are the same data.
`data.file` and `data.folder` are not among them, since they say which data the user's own are."""
LEFT_OUT = "leave_out"
_NOT_HYPERPARAMETERS = (
    *("experiment", "name", "results", "resume", "algorithm.name"),
    *("metrics", "evaluate.every", "evaluate.initial", "evaluate.points", "evaluate.splits"),
    *LOCATION_KEYS,
)
_NOT_HYPERPARAMETER_PREFIXES = ("placement.", "checkpoint.", "faults.", "state.", "tracking.", "metrics.")
_MOST_REASONS = 5  # early stops that a report gives one by one


def group_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, algorithm, seed, status, started, leave_out, hyperparameters, order.

    `hyperparameters` is a string that names what varies: the values of `algorithm.*` that differ between trials of that
    algorithm, without the prefix, and every other configuration value that differs within the experiment. The seed,
    placement, checkpoints, the results folder, where the data are stored, and what is measured and how often do not
    count. Neither does the domain in `leave_out` ("" where none is left out): trials that leave out one domain each
    belong to one group.

    `order` is an integer that identifies the group. It sorts by algorithm, then by the values as numbers. The varying
    values are in further columns under their dotted names.
    """
    base = trials[["experiment", "trial", "algorithm", "seed", "status", "started"]].reset_index(drop=True)
    names = [name for name in trials.columns if _is_hyperparameter(name)]
    values = trials[names].reset_index(drop=True).astype(object)
    values = values.where(values.notna(), None)
    base[LEFT_OUT] = list(trials[LEFT_OUT].astype(object).fillna("").astype(str)) if LEFT_OUT in trials else ""
    if LEFT_OUT in trials:
        left_out = ["each in turn" if domain else None for domain in base[LEFT_OUT]]
        values[LEFT_OUT] = pd.Series(left_out, dtype=object)  # with `map`, pandas would turn None into NaN
    of_algorithm = [name for name in names if name.startswith("algorithm.")]
    others = [name for name in names if name not in of_algorithm]
    shown: list[list[str]] = [[] for _ in range(len(base))]  # by trial, the names of the values that vary
    for columns, keys in ((of_algorithm, ["experiment", "algorithm"]), (others, ["experiment"])):
        for _, group in base.groupby(keys):
            varying = [name for name in columns if values.loc[group.index, name].map(repr).nunique() > 1]
            for index in group.index:
                shown[index].extend(varying)
    labels = [
        ", ".join(f"{name.removeprefix('algorithm.')}={format_value(values.at[index, name])}" for name in names)
        for index, names in enumerate(shown)
    ]
    sort_keys = [
        (str(base.at[index, "algorithm"]), tuple(_sort_key(values.at[index, name]) for name in shown[index]), label)
        for index, label in enumerate(labels)
    ]
    rank = {key: order for order, key in enumerate(sorted(set(sort_keys)))}
    order = pd.Series([rank[key] for key in sort_keys], dtype="int64")
    varying = sorted({name for columns in shown for name in columns}, key=names.index)
    shown_values = values[[name for name in varying if name != LEFT_OUT]]
    return base.assign(hyperparameters=pd.Series(labels, dtype=object), order=order).join(shown_values)


def format_value(value: Any) -> str:
    """Return a configuration value as a short string: 0.1, 3, true, none."""
    if value is None or value != value:  # pandas reads null as NaN
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_hyperparameter(name: str) -> bool:
    return name not in FIXED and name not in _NOT_HYPERPARAMETERS and not name.startswith(_NOT_HYPERPARAMETER_PREFIXES)


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    try:
        return (0, float(value), format_value(value))  # a number in a column of strings
    except (TypeError, ValueError):
        return (1, 0.0, format_value(value))


def countable_trials(
    trials: pd.DataFrame, groups: pd.DataFrame, counts: pd.DataFrame, criteria: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials that count, in the columns of `group_trials`, and a note on each kind of trial that does not.

    For each group, seed and left-out domain, the last trial that is done counts. The arguments are the attributes of
    `Tables`.
    """
    notes = []
    unfinished = {status: int((groups["status"] == status).sum()) for status in STATUSES if status != "done"}
    if any(unfinished.values()):
        words = ", ".join(f"{count} {status}" for status, count in unfinished.items() if count)
        notes.append(f"{sum(unfinished.values())} of {len(groups)} trials are not done and do not count: {words}.")
    stopped = trials[trials["stop_reason"].notna()]
    notes += [
        f"{row['trial']} stopped early, after round {int(row['rounds_done'])} of {int(row['rounds'])}: "
        f"{row['stop_reason']}."
        for row in stopped.head(_MOST_REASONS).to_dict("records")
    ]
    if (more := len(stopped) - _MOST_REASONS) > 0:
        notes.append(f"{more} more trials stopped early; trials.stop_reason says why.")
    done = groups[groups["status"] == "done"].sort_values(["started", "trial"])
    once = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    if repeated := len(done) - len(once):
        words = "1 trial does" if repeated == 1 else f"{repeated} trials do"
        notes.append(f"{words} not count, because a later one has the same hyperparameters and seed.")
    for experiment, metrics in _different(trials, "selection_metric"):
        notes.append(
            f"{experiment}: trials differ in select.metric ({', '.join(metrics)}); rounds and hyperparameters are "
            f"chosen by {criteria[experiment]}; --select METRIC chooses by another."
        )
    notes += _code_notes(once, trials)
    for experiment, intervals in _different(trials.merge(once[TRIAL], on=TRIAL), "evaluate.every"):
        notes.append(
            f"{experiment}: trials differ in evaluate.every ({' and '.join(f'{every:g}' for every in intervals)}). "
            "Trials that are scored more often have more rounds to pick from, so selected, oracle, best5 and --target "
            "do not compare them fairly; final does."
        )
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


def _different(trials: pd.DataFrame, column: str) -> list[tuple[str, list[Any]]]:
    """Return each experiment whose trials differ in a column, with the sorted values."""
    if column not in trials:
        return []
    values = trials.dropna(subset=column).groupby("experiment")[column].unique().map(sorted)
    return [(str(experiment), several) for experiment, several in values.items() if len(several) > 1]


def _code_notes(done: pd.DataFrame, trials: pd.DataFrame) -> list[str]:
    """Return a note on each group whose trials ran with different code of the user."""
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
