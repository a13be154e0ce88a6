"""Compute a table's columns from what its trials recorded.

Each column has one of the rules below. In a table with `settings`, the key `setting` names the one in which the column
is measured. `small` holds keys that differ in the small form, or is false if the small form lacks the column.

    {split, over, rounds}      accuracy in percentage points, or the metric named by `metric` (shares in points; of
                               several names the first that a row has)
        over                   the mean over clients or test sets (mean), the mean weighted by their examples
                               (weighted), the lowest of them (worst), or one domain ({domain: NAME})
        rounds                 last; best: the best round on this very split, as some papers report; best5: the mean
                               of the five best rounds
        point                  the scored model (see evaluate.points) where it is not the method's default
        unseen_clients         true: the score of clients that took no part in training
    {reach, target, unit}      the first round at which the column `reach` reaches `target` points, or the GB or MB sent
                               until then; if the target is a list of rows, the lowest of their last rounds
    {fewer, than}              a speed-up: the column `fewer` of the row `than`, divided by that of the row itself
    {sent, unit}               GB or MB per round: down, up or both
    {best_of, unit}            the round with the best value of the column `best_of`, or the minutes until then
    {spent}                    wall-clock time: hours for all rounds, or minutes a round

The value is infinity if a row never reaches the target.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.round_record import is_fraction

Rule = Mapping[str, Any]

OVER = ("mean", "weighted", "worst")
ROUNDS = {
    "last": lambda series: series.iloc[-1],
    "best": lambda series: series.max(),
    "best5": lambda series: series.nlargest(5).mean(),
}
BYTES = {"GB": 1e9, "MB": 1e6}
UNITS = {"reach": (*BYTES, "rounds"), "best_of": ("rounds", "minutes")}
DIRECTIONS = {"down": ["bytes_down"], "up": ["bytes_up"], "both": ["bytes_down", "bytes_up"]}
OPTIONAL = {"metric", "point", "unseen_clients", "setting", "small"}
# The keys that each kind of rule must have; later kinds build on earlier ones.
KINDS = {
    "split": {"split", "over", "rounds"},
    "sent": {"sent", "unit"},
    "spent": {"spent"},
    "best_of": {"best_of", "unit"},
    "reach": {"reach", "target", "unit"},
    "fewer": {"fewer", "than"},
}


class Trial(NamedTuple):
    """The results of a finished trial: its scores, its rounds, and the point at which its method is scored."""

    scores: pd.DataFrame
    rounds: pd.DataFrame
    default_eval_point: str


Key = tuple[str, int]  # row and seed
Trials = Mapping[tuple[str, str | None, int], Trial]  # by row, setting (None: the table has none) and seed


def kind(rule: Rule) -> str:
    """Return the kind of `rule`.

    Raises:
        UsageError: if it is not a valid rule.
    """
    kinds = [name for name in KINDS if name in rule]
    if len(kinds) != 1 or set(rule) - OPTIONAL != KINDS[kinds[0]] or not _has_valid_values(rule):
        raise UsageError(f"{dict(rule)} is not a valid rule for a column")
    return kinds[0]


def _has_valid_values(rule: Rule) -> bool:
    over = rule.get("over", "mean")
    return (
        (over in OVER if isinstance(over, str) else set(over) == {"domain"})
        and rule.get("rounds", "last") in ROUNDS
        and rule.get("sent", "both") in DIRECTIONS
        and rule.get("spent", "hours") in ("hours", "minutes a round")
        and rule.get("unit", "MB") in UNITS.get(next(iter(rule.keys() & UNITS), ""), BYTES)
        and isinstance(rule.get("target", 0), int | float | list)
    )


def in_points(rule: Rule) -> bool:
    """Return whether the column holds percentage points."""
    return "split" in rule and is_fraction(_metrics(rule)[0])


def _metrics(rule: Rule) -> Sequence[str]:
    names = rule.get("metric", "accuracy")
    return [names] if isinstance(names, str) else names


def values(columns: Mapping[str, Rule], trials: Trials) -> pd.DataFrame:
    """Return a table with a line for each row, seed and column that was measured."""
    by_column: dict[str, dict[Key, float]] = {}
    for name in sorted(columns, key=lambda name: list(KINDS).index(kind(columns[name]))):
        settings = (None, columns[name].get("setting"))
        measured = {(row, seed): trial for (row, setting, seed), trial in trials.items() if setting in settings}
        by_column[name] = dict(_column(columns, name, measured, by_column))
    keys = dict.fromkeys((row, seed) for row, _, seed in trials)
    lines = [(*key, name, by_column[name][key]) for key in keys for name in columns if key in by_column[name]]
    return pd.DataFrame(lines, columns=["row", "seed", "column", "value"])


def curves(columns: Mapping[str, Rule], trials: Trials) -> pd.DataFrame:
    """Return a table with a line for each row, seed, column and evaluated round, of columns that show the last one."""
    lines = []
    for name, rule in columns.items():
        if rule.get("rounds") != "last":
            continue
        for (row, setting, seed), trial in trials.items():
            if setting in (None, rule.get("setting")):
                lines += [(row, seed, name, number, value) for number, value in series(trial, rule).items()]
    return pd.DataFrame(lines, columns=["row", "seed", "column", "round", "value"])


def _column(
    columns: Mapping[str, Rule], name: str, trials: Mapping[Key, Trial], by_column: Mapping[str, Mapping[Key, float]]
) -> Iterator[tuple[Key, float]]:
    rule = columns[name]
    rule_kind = kind(rule)
    target = _target(columns[rule["reach"]], rule["target"], trials) if rule_kind == "reach" else None
    for (row, seed), trial in trials.items():
        if rule_kind == "split":
            scores = series(trial, rule)
            if len(scores):
                yield (row, seed), float(ROUNDS[rule["rounds"]](scores))
        elif rule_kind == "sent":
            yield (row, seed), _sent(trial, rule["sent"])[trial.rounds["round"] > 0].mean() / BYTES[rule["unit"]]
        elif rule_kind == "spent":
            seconds, in_rounds = trial.rounds["seconds_total"], trial.rounds["round"] > 0
            yield (row, seed), seconds.sum() / 3600 if rule["spent"] == "hours" else seconds[in_rounds].mean() / 60
        elif rule_kind == "best_of" and len(scores := series(trial, columns[rule["best_of"]])):
            last = scores.idxmax()
            minutes = trial.rounds["seconds_total"][trial.rounds["round"] <= last].sum() / 60
            yield (row, seed), float(last if rule["unit"] == "rounds" else minutes)
        elif rule_kind == "reach" and target is not None:
            yield (row, seed), _reached(trial, series(trial, columns[rule["reach"]]), target, rule["unit"])
        elif rule_kind == "fewer" and {(row, seed), (rule["than"], seed)} <= set(by_column[rule["fewer"]]):
            value, reference = (by_column[rule["fewer"]][name, seed] for name in (row, rule["than"]))
            if math.isfinite(reference) and value:  # SOLO sends nothing
                yield (row, seed), reference / value


def series(trial: Trial, rule: Rule) -> pd.Series:
    """Return a column's value after each evaluated round, indexed by round."""
    recorded = set(trial.scores["metric"])
    metric = next((name for name in _metrics(rule) if name in recorded), "")
    rows = trial.scores[(trial.scores["split"] == rule["split"]) & (trial.scores["metric"] == metric)]
    rows = rows[rows["point"] == rule.get("point", trial.default_eval_point)]
    if "unseen" in rows:
        rows = rows[rows["unseen"] == rule.get("unseen_clients", False)]
    over = rule["over"]
    if isinstance(over, Mapping):
        rows, over = rows[rows["domain"] == over["domain"]], "mean"
    by_round = rows.sort_values("round").groupby("round")
    if over == "weighted" and len(rows):
        scores = by_round.apply(lambda part: np.average(part["value"], weights=part["n"]), include_groups=False)
    else:
        scores = by_round["value"].min() if over == "worst" else by_round["value"].mean()
    return scores * (100 if is_fraction(metric) else 1)


def _target(rule: Rule, target: float | Sequence[str], trials: Mapping[Key, Trial]) -> float | None:
    """Return the target in points. For a list of rows it is the lowest of their last rounds, each a mean over seeds.

    None if one of the rows is missing.
    """
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


def _sent(trial: Trial, direction: str) -> pd.Series:
    return trial.rounds[DIRECTIONS[direction]].sum(axis=1)
