"""A table's columns, worked out of what its trials recorded.

Each column has one of these rules. Where the table has `settings`, `setting` says in which the column is measured;
`small` holds the keys that are otherwise in the small form (or false: not in it).

    {split, over, rounds}      accuracy in points, or with `metric` another one as it is (shares in points; of several
                               the first that a row has); with `unseen_clients: true` that of clients that took no
                               part in training
        over                   mean: over clients, or over test sets; weighted: by their examples; worst: the lowest of
                               them; or {domain: NAME}
        rounds                 last; best: the best round (on this very split, as some papers do); best5: the mean of
                               the five best rounds
        point                  the model that is scored (see evaluate.points), where it is not the method's own choice
        unseen_clients         true: of clients that took no part in training
    {reach, target, unit}      when the column `reach` comes to `target` points: the first such round, or the GB or MB
                               sent until then; a list of rows as target is the lowest of their last rounds
    {fewer, than}              the row `than` in the column `fewer`, divided by the row at hand: a speed-up
    {sent, unit}               GB or MB a round: down, up or both
    {spent: hours}             wall clock of all rounds

What never comes to its target has the value infinity.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.results.metric_names import is_fraction

Rule = Mapping[str, Any]

OVER = ("mean", "weighted", "worst")
ROUNDS = {
    "last": lambda series: series.iloc[-1],
    "best": lambda series: series.max(),
    "best5": lambda series: series.nlargest(5).mean(),
}
BYTES = {"GB": 1e9, "MB": 1e6}
WAYS = {"down": ["bytes_down"], "up": ["bytes_up"], "both": ["bytes_down", "bytes_up"]}
OPTIONAL = {"metric", "point", "unseen_clients", "setting", "small"}
# What a rule must have, by the key that tells its kind; later kinds are made of earlier ones.
KINDS = {
    "split": {"split", "over", "rounds"},
    "sent": {"sent", "unit"},
    "spent": {"spent"},
    "reach": {"reach", "target", "unit"},
    "fewer": {"fewer", "than"},
}


class Trial(NamedTuple):
    """What a trial that is done left: its scores, its rounds, and the point at which its method is scored."""

    scores: pd.DataFrame
    rounds: pd.DataFrame
    scored: str


Key = tuple[str, int]  # row and seed
Trials = Mapping[tuple[str, str | None, int], Trial]  # by row, setting (None: the table has none) and seed


def kind(rule: Rule) -> str:
    """Which kind of rule it is; `UsageError` for none."""
    found = [name for name in KINDS if name in rule]
    if len(found) != 1 or set(rule) - OPTIONAL != KINDS[found[0]] or not _possible(rule):
        raise UsageError(f"{dict(rule)} is no rule of a column")
    return found[0]


def _possible(rule: Rule) -> bool:
    over = rule.get("over", "mean")
    return (
        (over in OVER if isinstance(over, str) else set(over) == {"domain"})
        and rule.get("rounds", "last") in ROUNDS
        and rule.get("sent", "both") in WAYS
        and rule.get("spent", "hours") == "hours"
        and rule.get("unit", "MB") in (*BYTES, *(("rounds",) if "reach" in rule else ()))
        and isinstance(rule.get("target", 0), int | float | list)
    )


def in_points(rule: Rule) -> bool:
    """Whether the column holds accuracies."""
    return "split" in rule and is_fraction(_metrics(rule)[0])


def _metrics(rule: Rule) -> Sequence[str]:
    given = rule.get("metric", "accuracy")
    return [given] if isinstance(given, str) else given


def values(columns: Mapping[str, Rule], trials: Trials) -> pd.DataFrame:
    """A line for each row, seed and column that was measured."""
    found: dict[str, dict[Key, float]] = {}
    for name in sorted(columns, key=lambda name: list(KINDS).index(kind(columns[name]))):
        where = (None, columns[name].get("setting"))
        own = {(row, seed): trial for (row, setting, seed), trial in trials.items() if setting in where}
        found[name] = dict(_column(columns, name, own, found))
    keys = dict.fromkeys((row, seed) for row, _, seed in trials)
    lines = [(*key, name, found[name][key]) for key in keys for name in columns if key in found[name]]
    return pd.DataFrame(lines, columns=["row", "seed", "column", "value"])


def _column(
    columns: Mapping[str, Rule], name: str, trials: Mapping[Key, Trial], found: Mapping[str, Mapping[Key, float]]
) -> Iterator[tuple[Key, float]]:
    rule = columns[name]
    which = kind(rule)
    target = _target(columns[rule["reach"]], rule["target"], trials) if which == "reach" else None
    for (row, seed), trial in trials.items():
        if which == "split":
            scores = series(trial, rule)
            if len(scores):
                yield (row, seed), float(ROUNDS[rule["rounds"]](scores))
        elif which == "sent":
            yield (row, seed), _sent(trial, rule["sent"])[trial.rounds["round"] > 0].mean() / BYTES[rule["unit"]]
        elif which == "spent":
            yield (row, seed), trial.rounds["seconds_total"].sum() / 3600
        elif which == "reach" and target is not None:
            yield (row, seed), _reached(trial, series(trial, columns[rule["reach"]]), target, rule["unit"])
        elif which == "fewer" and {(row, seed), (rule["than"], seed)} <= set(found[rule["fewer"]]):
            own, other = (found[rule["fewer"]][each, seed] for each in (row, rule["than"]))
            if math.isfinite(other) and own:  # SOLO sends nothing
                yield (row, seed), other / own


def series(trial: Trial, rule: Rule) -> pd.Series:
    """A column's value after each evaluated round."""
    there = set(trial.scores["metric"])
    metric = next((name for name in _metrics(rule) if name in there), "")
    rows = trial.scores[(trial.scores["split"] == rule["split"]) & (trial.scores["metric"] == metric)]
    rows = rows[rows["point"] == rule.get("point", trial.scored)]
    if "unseen" in rows:
        rows = rows[rows["unseen"] == rule.get("unseen_clients", False)]
    over = rule["over"]
    if isinstance(over, Mapping):
        rows, over = rows[rows["domain"] == over["domain"]], "mean"
    by_round = rows.sort_values("round").groupby("round")
    if over == "weighted" and len(rows):
        found = by_round.apply(lambda part: np.average(part["value"], weights=part["n"]), include_groups=False)
    else:
        found = by_round["value"].min() if over == "worst" else by_round["value"].mean()
    return found * (100 if is_fraction(metric) else 1)


def _target(rule: Rule, target: float | Sequence[str], trials: Mapping[Key, Trial]) -> float | None:
    """In points; of rows the lowest of their last rounds, each a mean over seeds, and None where one is missing."""
    if isinstance(target, int | float):
        return target
    ends = {row: [series(trial, rule).iloc[-1] for (name, _), trial in trials.items() if name == row] for row in target}
    return min(float(np.mean(end)) for end in ends.values()) if all(ends.values()) else None


def _reached(trial: Trial, scores: pd.Series, target: float, unit: str) -> float:
    rounds = scores.index[scores >= target]
    if not len(rounds):
        return math.inf
    if unit == "rounds":
        return float(rounds[0])
    return _sent(trial, "both")[trial.rounds["round"] <= rounds[0]].sum() / BYTES[unit]


def _sent(trial: Trial, way: str) -> pd.Series:
    return trial.rounds[WAYS[way]].sum(axis=1)
