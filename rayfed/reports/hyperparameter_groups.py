"""Groups of trials that repeat one algorithm with the same hyperparameters and another seed."""

from typing import Any

import pandas as pd

from rayfed.records.trials import FIXED

LOCATION_KEYS = ("data.root", "data.download")
"""Keys that say where a dataset's files are and how they got there; the same files elsewhere are the same data.
`data.file` and `data.folder` are not among them, since they say what the user's own data are."""
LEFT_OUT = "leave_out"
_NOT_HYPERPARAMETERS = (
    *("experiment", "name", "results", "resume", "algorithm.name"),
    *("metrics", "evaluate.every", "evaluate.initial", "evaluate.points", "evaluate.splits"),
    *LOCATION_KEYS,
)
_NOT_HYPERPARAMETER_PREFIXES = ("placement.", "checkpoint.", "faults.", "state.", "tracking.", "metrics.")


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
    if LEFT_OUT in trials:
        base[LEFT_OUT] = trials[LEFT_OUT].reset_index(drop=True).astype(object).fillna("").astype(str)
        left_out = ["each in turn" if domain else None for domain in base[LEFT_OUT]]
        values[LEFT_OUT] = pd.Series(left_out, dtype=object)  # with `map`, pandas would turn None into NaN
    else:
        base[LEFT_OUT] = ""
    of_algorithm = [name for name in names if name.startswith("algorithm.")]
    others = [name for name in names if name not in of_algorithm]
    shown: list[list[str]] = [[] for _ in range(len(base))]  # by trial, the names of the values that vary
    for columns, keys in ((of_algorithm, ["experiment", "algorithm"]), (others, ["experiment"])):
        for _, group in base.groupby(keys):
            varying = [name for name in columns if values.loc[group.index, name].map(repr).nunique() > 1]
            for index in group.index:
                shown[index].extend(varying)
    labels = [_label(values.loc[index], shown[index]) for index in range(len(base))]
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


def _label(values: pd.Series, names: list[str]) -> str:
    return ", ".join(f"{name.removeprefix('algorithm.')}={format_value(values[name])}" for name in names)


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    try:
        return (0, float(value), format_value(value))  # a number in a column of strings
    except (TypeError, ValueError):
        return (1, 0.0, format_value(value))
