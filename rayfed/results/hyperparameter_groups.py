"""Which trials are repetitions of one setting: the same algorithm and hyperparameters, another seed."""

from typing import Any

import pandas as pd

from rayfed.results.trials import FIXED

PLACES = ("data.root", "data.download")
"""Where a dataset's files lie, and how they came there: the same files elsewhere are the same data. `data.file` and
`data.folder` are not here, since they say which data a user's own are."""
_NOT_A_SETTING = (
    *("experiment", "name", "results", "resume", "algorithm.name"),
    *("metrics", "evaluate.every", "evaluate.initial", "evaluate.points", "evaluate.splits"),
    *PLACES,
)
LEFT_OUT = "leave_out"
_NOT_A_SETTING_GROUP = ("placement.", "checkpoint.", "metrics.")


def settings(trials: pd.DataFrame) -> pd.DataFrame:
    """One row a trial: experiment, trial, algorithm, seed, status, started, leave_out, `setting` and `order`.

    `setting`, a text, names what varies: values of `algorithm.*` that differ between trials of that algorithm, without
    the prefix, and any other configuration value that differs inside the experiment. Seed, placement, checkpoints, the
    results folder, where the data lie, and what to measure and how often are no setting, nor is the domain that
    `leave_out` names: trials that leave out one domain each are together one setting. `leave_out` is "" where none is
    left out. `order`, a number, sorts by algorithm, then by the values as numbers. The values themselves are in further
    columns under their dotted names.
    """
    base = trials[["experiment", "trial", "algorithm", "seed", "status", "started"]].reset_index(drop=True)
    names = [name for name in trials.columns if _is_setting(name)]
    values = trials[names].reset_index(drop=True).astype(object)
    values = values.where(values.notna(), None)
    if LEFT_OUT in trials:
        base[LEFT_OUT] = trials[LEFT_OUT].reset_index(drop=True).astype(object).fillna("").astype(str)
        turns = ["each in turn" if domain else None for domain in base[LEFT_OUT]]
        values[LEFT_OUT] = pd.Series(turns, dtype=object)  # with `map`, pandas would make NaN of None
    else:
        base[LEFT_OUT] = ""
    own = [name for name in names if name.startswith("algorithm.")]
    shared = [name for name in names if name not in own]
    shown: list[list[str]] = [[] for _ in range(len(base))]
    for columns, group_by in ((own, ["experiment", "algorithm"]), (shared, ["experiment"])):
        for _, group in base.groupby(group_by):
            varying = [name for name in columns if values.loc[group.index, name].map(repr).nunique() > 1]
            for index in group.index:
                shown[index].extend(varying)
    setting = [_label(values.loc[index], shown[index]) for index in range(len(base))]
    keys = [
        (str(base.at[index, "algorithm"]), tuple(_sort_key(values.at[index, name]) for name in shown[index]), label)
        for index, label in enumerate(setting)
    ]
    place = {key: order for order, key in enumerate(sorted(set(keys)))}
    varying = sorted({name for columns in shown for name in columns}, key=names.index)
    order = pd.Series([place[key] for key in keys], dtype="int64")
    shown_values = values[[name for name in varying if name != LEFT_OUT]]
    return base.assign(setting=pd.Series(setting, dtype=object), order=order).join(shown_values)


def text(value: Any) -> str:
    """A configuration value in few letters: 0.1, 3, true, none."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_setting(name: str) -> bool:
    return name not in FIXED and name not in _NOT_A_SETTING and not name.startswith(_NOT_A_SETTING_GROUP)


def _label(values: pd.Series, names: list[str]) -> str:
    return ", ".join(f"{name.removeprefix('algorithm.')}={text(values[name])}" for name in names)


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    try:
        return (0, float(value), text(value))  # a number in a column of texts: cohort=1 beside cohort=1.0
    except (TypeError, ValueError):
        return (1, 0.0, text(value))
