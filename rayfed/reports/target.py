"""Rounds and gigabytes that trials need to reach a target."""

import math

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.plain_table import plain_table
from rayfed.records.metric_names import comparable, is_fraction
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL

GIGABYTE = 1e9


def check_target(target: float, metric: str) -> None:
    """Raise `UsageError` for NaN, and for a percentage where `metric` is a fraction of 1."""
    if target != target or (is_fraction(metric) and not 0 <= target <= 1):
        raise UsageError(f"target={target:g}: {metric} is a fraction of 1; give a number from 0 to 1, such as 0.8")


def rounds_to_target(means: pd.DataFrame, tables: Tables, target: float) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, round, gigabytes.

    `round` is the first evaluated round whose value is at least `target` (at most, where lower is better). `gigabytes`
    (10⁹ bytes) counts everything sent down and up until its end, including the setup. Both are NaN if the target was
    never reached.

    Args:
        means: one row per trial and evaluated round: experiment, trial, round, higher_is_better, value.
    """
    gap = comparable(means["value"]) - target
    tolerance = 1e-11 * abs(target)  # a mean that differs by rounding errors only has reached it
    enough = means[(gap >= -tolerance).where(means["higher_is_better"], gap <= tolerance)]
    first = enough.groupby(TRIAL)["round"].min().reset_index()
    trials = means[TRIAL].drop_duplicates().merge(first, on=TRIAL, how="left")
    rounds = tables.rounds.sort_values("round")
    sent = rounds[[*TRIAL, "round"]].assign(gigabytes=gigabytes_sent(rounds))
    return trials.merge(sent, on=[*TRIAL, "round"], how="left")


def gigabytes_sent(rounds: pd.DataFrame) -> pd.Series:
    """Return the gigabytes (10⁹ bytes) that were sent down and up until the end of each round, with the setup.

    Args:
        rounds: the table `rounds`, in the order of its rounds.
    """
    return (rounds["bytes_down"] + rounds["bytes_up"]).groupby([rounds[name] for name in TRIAL]).cumsum() / GIGABYTE


def target_table(reached: pd.DataFrame, trials: pd.DataFrame, *, width: int) -> str:
    """Return a table of mean ± sd over the trials of each group, and how many of them reached the target.

    Args:
        reached: the result of `rounds_to_target`.
        trials: the trials that count, as in `Tables.done`.
    """
    rows = reached.merge(trials[[*TRIAL, "order", "algorithm", "hyperparameters"]], on=TRIAL).sort_values("order")
    columns: dict[str, list[str]] = {"algorithm": [], "hyperparameters": [], "rounds": [], "GB": [], "reached": []}
    for _, group in rows.groupby("order"):
        columns["algorithm"].append(group["algorithm"].iloc[0])
        columns["hyperparameters"].append(group["hyperparameters"].iloc[0])
        columns["rounds"].append(_format_mean(group["round"], 1))
        columns["GB"].append(_format_mean(group["gigabytes"], _decimals(group["gigabytes"].mean())))
        columns["reached"].append(f"{group['round'].notna().sum()} of {len(group)}")
    if not any(columns["hyperparameters"]):
        del columns["hyperparameters"]
    return plain_table(columns, left=("algorithm", "hyperparameters"), width=width)


def _decimals(gigabytes: float) -> int:
    """Return three decimals, or as many as show three digits of what a small model sends."""
    return max(3, 2 - math.floor(math.log10(gigabytes))) if gigabytes > 0 else 3


def _format_mean(values: pd.Series, decimals: int) -> str:
    values = values.dropna()
    if values.empty:
        return "never"
    spread = f" ± {values.std():.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"
