"""Groups of trials that differ only in seed and left-out domain, and the trials that count.

Trials with different data are never in one table: they are kept apart as if they were of different experiments.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd

from rayfed.records.trial_rows import FIXED, STATUSES
from rayfed.reports.selection import TRIAL

LOCATION_KEYS = ("data.root", "data.download")
"""Keys that say where a dataset's files are and how they got there, which are no hyperparameters. `data.file` and
`data.folder` are not among them, because they say which data a user's own are."""
_DATA_PREFIXES = ("data.", "partition.")
_DATA_KEYS = ("unseen_clients", "unseen_share")
_PARTITION_FILE = "partition.file"
_NOT_DATA = (*LOCATION_KEYS, "data.standardize", "partition.seed")
LEFT_OUT = "leave_out"
_NOT_HYPERPARAMETERS = (
    *("experiment", "name", "results", "resume", "algorithm.name"),
    *("metrics", "evaluate.every", "evaluate.initial", "evaluate.points", "evaluate.splits"),
    "evaluate.predictions",
    *LOCATION_KEYS,
)
_NOT_HYPERPARAMETER_PREFIXES = ("placement.", "checkpoint.", "faults.", "state.", "tracking.", "metrics.")
ALGORITHM_PREFIX = "algorithm."
_NOISE_COHORT = "privacy.noise_cohort"
_OF_METHODS = ("algorithm.", "data.", "partition.", "evaluate.", "select.")
"""Prefixes of keys in which methods differ by nature, or that other notes and tables are about."""
_MOST_REASONS = 5  # early stops that a report gives one by one


def experiments_by_data(trials: pd.DataFrame) -> pd.Series:
    """Return the experiment of each trial, followed by its data where the trials of the experiment differ in them.

    "skew (partition.alpha=0.1)" and "skew (partition.alpha=10)" are two experiments: their clients hold different
    examples, so that their scores cannot be compared.
    """
    names = [name for name in trials if says_which_data(name)]
    values = trials[names].astype(object)
    values = values.where(values.notna(), None)
    experiments = trials["experiment"].copy()
    for experiment, rows in trials.groupby("experiment"):
        varying = []
        for name in names:
            if _varies(values.loc[rows.index, name]):
                varying.append(name)
        if _PARTITION_FILE in varying and _has_one_split_per_seed(rows):  # files of the same contents
            varying.remove(_PARTITION_FILE)
        if varying:
            for index in rows.index:
                experiments[index] = f"{experiment} ({_label(values, index, varying)})"
    return experiments


def _has_one_split_per_seed(trials: pd.DataFrame) -> bool:
    splits = trials.groupby("seed")["partition_hash"].nunique(dropna=False)
    return bool(splits.max() == 1)


def says_which_data(name: str) -> bool:
    """Return whether a configuration value decides which examples clients hold."""
    return name in _DATA_KEYS or (name.startswith(_DATA_PREFIXES) and name not in _NOT_DATA)


def group_trials(trials: pd.DataFrame) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, algorithm, seed, status, started, leave_out, hyperparameters, order.

    `hyperparameters` is a string that names what varies: the configuration values that differ between the trials of an
    algorithm in an experiment, those of `algorithm.*` first and without the prefix. The seed, placement, checkpoints,
    folders, and what is measured and how often do not count. Neither does the domain in `leave_out` ("" if none is left
    out): trials that leave out one domain each form one group.

    `order` is an even integer that identifies the group; it sorts by algorithm, then by the values as numbers. Further
    columns have the values that vary, under their dotted names.
    """
    base = trials[["experiment", "trial", "algorithm", "seed", "status", "started"]].reset_index(drop=True)
    base[LEFT_OUT] = _left_out_domains(trials)
    values = _hyperparameters(trials)
    shown = _varying_keys(base, values)
    labels = []
    sort_keys = []
    for index, keys in enumerate(shown):
        label = _label(values, index, keys)
        ranks = tuple(_sort_key(values.at[index, key]) for key in keys)
        labels.append(label)
        sort_keys.append((str(base.at[index, "algorithm"]), ranks, label))
    position = {}
    for place, key in enumerate(sorted(set(sort_keys))):
        position[key] = 2 * place
    base["hyperparameters"] = pd.Series(labels, dtype=str)
    numbers = [position[key] for key in sort_keys]
    base["order"] = pd.Series(numbers, dtype="int64")
    return base.join(_columns_that_vary(values, shown))


def _left_out_domains(trials: pd.DataFrame) -> Sequence[str] | str:
    """Return the domain that each trial leaves out, "" if none."""
    if LEFT_OUT not in trials:
        return ""
    domains = trials[LEFT_OUT].astype(object).fillna("")
    return list(domains.astype(str))


def _hyperparameters(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the configuration values that may tell groups apart, a row per trial; None where there is no such key."""
    fixed = (*FIXED, *_NOT_HYPERPARAMETERS)
    names = []
    for name in trials:
        if name not in fixed and not name.startswith(_NOT_HYPERPARAMETER_PREFIXES):
            names.append(name)
    values = trials[names].reset_index(drop=True).astype(object)
    values = values.where(values.notna(), None)
    if LEFT_OUT in trials:
        words = {True: None, False: "each in turn"}
        left_out = []
        for domain in _left_out_domains(trials):
            left_out.append(words[domain == ""])
        values[LEFT_OUT] = pd.Series(left_out, dtype=object)  # with `map`, pandas would turn None into NaN
    return values


def _varying_keys(base: pd.DataFrame, values: pd.DataFrame) -> list[list[str]]:
    """Return for each trial the columns of `values` that tell its group from others."""
    names = sorted(values, key=lambda name: not name.startswith(ALGORITHM_PREFIX))
    shown: list[list[str]] = [[] for _ in range(len(base))]
    for _, group in base.groupby(["experiment", "algorithm"]):
        of_group = values.loc[group.index]
        varying = [name for name in names if _varies(of_group[name])]
        for index in group.index:
            shown[index] = varying
    return shown


def _varies(values: pd.Series) -> bool:
    return bool(values.map(repr).nunique() > 1)


def _label(values: pd.DataFrame, index: int, keys: Sequence[str]) -> str:
    """Return the values of a trial as "mu=1, local.lr=0.1"."""
    pairs = []
    for key in keys:
        value = format_value(values.at[index, key])
        pairs.append(f"{key.removeprefix(ALGORITHM_PREFIX)}={value}")
    return ", ".join(pairs)


def _columns_that_vary(values: pd.DataFrame, shown: Sequence[Sequence[str]]) -> pd.DataFrame:
    varying = set[str]().union(*shown) - {LEFT_OUT}
    return values[[name for name in values if name in varying]]


def format_value(value: Any) -> str:
    """Return a configuration value as a short string: 0.1, 3, true, none."""
    if value is None or value != value:  # pandas reads null as NaN
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def _sort_key(value: Any) -> tuple[int, float, str]:
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    try:
        return (0, float(value), format_value(value))  # a number in a column of strings
    except (TypeError, ValueError):
        return (1, 0.0, format_value(value))


def countable_trials(
    trials: pd.DataFrame, groups: pd.DataFrame, criteria: Mapping[str, str]
) -> tuple[pd.DataFrame, list[str]]:
    """Return the trials that count, in the columns of `group_trials`, and a note on each kind of trial that does not.

    For each group, seed and left-out domain, the last trial that is done counts. The arguments are the attributes of
    `Tables`.
    """
    done = groups[groups["status"] == "done"].sort_values(["started", "trial"])
    counted = done.drop_duplicates(["experiment", "order", "seed", LEFT_OUT], keep="last")
    notes = [
        *_unfinished_notes(groups),
        *_stopped_notes(trials),
        *_repeated_notes(len(done) - len(counted)),
        *_criterion_notes(trials, criteria),
        *_difference_notes(counted, trials),
        *_code_notes(counted, trials),
        *_evaluation_notes(trials.merge(counted[TRIAL], on=TRIAL)),
        *_deployment_notes(trials.merge(counted[TRIAL], on=TRIAL)),
        *_leave_out_notes(counted),
    ]
    return counted, notes


def _unfinished_notes(groups: pd.DataFrame) -> Iterator[str]:
    words = []
    total = 0
    for status in STATUSES:
        count = int((groups["status"] == status).sum())
        if status != "done" and count:
            total += count
            words.append(f"{count} {status}")
    if words:
        states = ", ".join(words)
        yield f"{total} of {len(groups)} trials are not done and do not count: {states}."


def _stopped_notes(trials: pd.DataFrame) -> Iterator[str]:
    stopped = trials[trials["stop_reason"].notna()]
    for row in stopped.head(_MOST_REASONS).to_dict("records"):
        done = int(row["rounds_done"])
        rounds = f"round {done} of {int(row['rounds'])}"
        yield f"{row['trial']} stopped early, after {rounds}: {row['stop_reason']}."
    more = len(stopped) - _MOST_REASONS
    if more > 0:
        yield f"{more} more trials stopped early; trials.stop_reason says why."


def _repeated_notes(repeated: int) -> Iterator[str]:
    if repeated:
        words = "1 trial does"
        if repeated != 1:
            words = f"{repeated} trials do"
        yield f"{words} not count, because a later one has the same hyperparameters and seed."


def _criterion_notes(trials: pd.DataFrame, criteria: Mapping[str, str]) -> Iterator[str]:
    for experiment, metrics in _different(trials, "selection_metric"):
        names = ", ".join(metrics)
        yield (
            f"{experiment}: trials differ in select.metric ({names}); rounds and hyperparameters are chosen by "
            f"{criteria[experiment]}; --select METRIC chooses by another."
        )


def _difference_notes(counted: pd.DataFrame, trials: pd.DataFrame) -> Iterator[str]:
    """Yield a note on each experiment whose methods differ in values that no method varies, such as their models."""
    others = trials.drop(columns="algorithm")
    trials = counted[[*TRIAL, "algorithm"]].merge(others, on=TRIAL)
    values = _hyperparameters(trials)
    names = []
    for name in values:
        if not name.startswith(_OF_METHODS) and name != LEFT_OUT:
            names.append(name)
    for experiment, rows in trials.groupby("experiment"):
        texts = values.loc[rows.index, names].map(format_value)
        by_method = texts.groupby(rows["algorithm"])
        of_methods = by_method.agg(_values_in)
        words = []
        for name, column in of_methods.items():
            if _differs(column):
                words.append(_by_value(name, column))
        if words:
            yield f"{experiment}: methods differ in {', '.join(words)}."


def _values_in(column: pd.Series) -> tuple[str, ...]:
    """Return the different values of a column, sorted."""
    return tuple(sorted(set(column)))


def _differs(of_methods: pd.Series) -> bool:
    """Return whether methods have different values, and each method only one."""
    is_one_each = of_methods.map(len).max() == 1
    return bool(is_one_each and of_methods.nunique() > 1)


def _by_value(name: str, of_methods: pd.Series) -> str:
    """Return "local.lr (0.1: fedavg; 0.01: fedbn, ditto)"."""
    parts = []
    for (value,), methods in of_methods.groupby(of_methods):
        parts.append(f"{value}: {', '.join(methods.index)}")
    return f"{name} ({'; '.join(parts)})"


def _code_notes(counted: pd.DataFrame, trials: pd.DataFrame) -> Iterator[str]:
    """Yield a note on each group whose trials ran with different code of the user."""
    hashes = trials[[*TRIAL, "code_hash"]]
    hashed = counted.merge(hashes, on=TRIAL).dropna(subset=["code_hash"])
    for _, group in hashed.groupby(["experiment", "order"]):
        if group["code_hash"].nunique() > 1:
            versions = []
            for digest, of_code in group.groupby("code_hash"):
                versions.append(_seeds_of_code(str(digest), of_code))
            name = _group_name(*group.iloc[0][["experiment", "algorithm", "hyperparameters"]])
            yield f"{name}: your own code has changed between seeds (code_hash {'; '.join(versions)})."


def _seeds_of_code(digest: str, trials: pd.DataFrame) -> str:
    seeds = sorted(trials["seed"].unique())
    noun = "seed"
    if len(seeds) > 1:
        noun = "seeds"
    return f"{digest} at {noun} {', '.join(map(str, seeds))}"


def _evaluation_notes(counted: pd.DataFrame) -> Iterator[str]:
    for experiment, intervals in _different(counted, "evaluate.every"):
        words = " and ".join(f"{every:g}" for every in intervals)
        yield (
            f"{experiment}: trials differ in evaluate.every ({words}). "
            "Trials that are scored more often have more rounds to pick from, so selected, oracle, best5 and --target "
            "do not compare them fairly; final does."
        )


def _deployment_notes(counted: pd.DataFrame) -> Iterator[str]:
    """Yield a note on each experiment whose privacy is that of a larger deployment."""
    if _NOISE_COHORT not in counted:
        return
    for experiment, rows in counted.dropna(subset=_NOISE_COHORT).groupby("experiment"):
        cohorts = sorted(rows[_NOISE_COHORT].astype(int).unique())
        words = " and ".join(map(str, cohorts))
        methods = ", ".join(sorted(rows["algorithm"].unique()))
        yield (
            f"{experiment}: noise and ε of {methods} are those of a deployment with cohorts of {words} clients "
            f"({_NOISE_COHORT}). The cohorts of this simulation would need more noise."
        )


def _leave_out_notes(counted: pd.DataFrame) -> Iterator[str]:
    for experiment, leave_one_out in counted[counted[LEFT_OUT] != ""].groupby("experiment"):
        pairs = leave_one_out["seed"].nunique() * leave_one_out[LEFT_OUT].nunique()
        for (algorithm, hyperparameters), group in leave_one_out.groupby(["algorithm", "hyperparameters"]):
            if len(group) < pairs:
                name = _group_name(str(experiment), algorithm, hyperparameters)
                yield f"{name}: means are over {len(group)} of {pairs} pairs of seed and left-out domain."


def _group_name(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _different(trials: pd.DataFrame, column: str) -> list[tuple[str, list[Any]]]:
    """Return each experiment whose trials differ in a column, with the sorted values."""
    if column not in trials:
        return []
    different = []
    values = trials.dropna(subset=column).groupby("experiment")[column].unique()
    for experiment, several in values.items():
        if len(several) > 1:
            different.append((str(experiment), sorted(several)))
    return different
