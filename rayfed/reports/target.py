"""Rounds, gigabytes and simulated seconds that trials need to reach a target."""

import math
import textwrap

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.round_record import is_fraction
from rayfed.core.terminal import plain_table
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, comparable
from rayfed.reports.summary import View, average_words, filter_rows, scored_clients_notes, summarise

_GROUP = ["order", "algorithm", "hyperparameters"]


def target_text(tables: Tables, target: float, view: View, *, width: int) -> str:
    """Return a table for each experiment: the rounds and gigabytes until the mean over clients reaches `target`.

    Raises:
        UsageError: The metric cannot have this target, or there are no such values.
    """
    curves = tables.curves
    groups = tables.done[[*TRIAL, *_GROUP]]
    means = curves[curves["quantity"] == "mean"].merge(groups, on=TRIAL)
    means = filter_rows(means, tables, view)
    if view.chosen:
        shown = filter_rows(summarise(tables).rows, tables, view)
        means = means[means["order"].isin(shown["order"])]
    parts = []
    for experiment, rows in means.groupby("experiment"):
        _check_target(target, str(rows["metric"].iloc[0]))
        title = _title(str(experiment), rows, tables, target)
        reached = rounds_to_target(rows, tables, target)
        parts.append(textwrap.fill(title, width))
        parts.append(_target_table(reached, tables.done, width))
    for note in scored_clients_notes(tables.counts, means):
        parts.append(textwrap.fill(note, width))
    return "\n\n".join(parts)


def _check_target(target: float, metric: str) -> None:
    if is_fraction(metric):
        allowed = 0 <= target <= 1
    else:
        allowed = not math.isnan(target)
    if not allowed:
        raise UsageError(f"target={target:g}: {metric} is a fraction of 1; give a number from 0 to 1, such as 0.8")


def _title(experiment: str, rows: pd.DataFrame, tables: Tables, target: float) -> str:
    first = rows.iloc[0]
    counts = tables.counts[tables.counts["experiment"] == experiment]
    trials = tables.trials[tables.trials["experiment"] == experiment]
    average = average_words(counts, trials, first["split"], first["metric"])
    side = "at most"
    if first["higher_is_better"]:
        side = "at least"
    what = f"{first['split']} {first['metric']}, {average}"
    return (
        f"{experiment}: first evaluated round whose {what}, is {side} {target:g}, and GB (10⁹ bytes, down and up, "
        "including the setup) sent until its end, at the simulated seconds 'clock', if any; mean ± sd over the runs "
        "that reached it"
    )


def rounds_to_target(means: pd.DataFrame, tables: Tables, target: float) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, round, gigabytes, clock_seconds.

    `round` is the first evaluated round whose value is at least `target` (at most, where lower is better). `gigabytes`
    (10⁹ bytes) counts everything sent down and up until its end, including the setup. All are NaN if the target was
    never reached. `means` has a row per trial and evaluated round: experiment, trial, round, higher_is_better, value.
    """
    gap = comparable(means["value"]) - target
    tolerance = 1e-11 * abs(target)  # a mean that misses the target by a rounding error has reached it
    above = gap >= -tolerance
    below = gap <= tolerance
    enough = means[above.where(means["higher_is_better"], below)]
    first = enough.groupby(TRIAL)["round"].min().reset_index()
    trials = means[TRIAL].drop_duplicates().merge(first, on=TRIAL, how="left")
    rounds = tables.rounds.sort_values("round")
    sent = rounds[[*TRIAL, "round", "clock_seconds"]].assign(gigabytes=gigabytes_sent(rounds))
    return trials.merge(sent, on=[*TRIAL, "round"], how="left")


def gigabytes_sent(rounds: pd.DataFrame) -> pd.Series:
    """Return the gigabytes (10⁹ bytes) sent until the end of each round, the setup included; `rounds` are sorted."""
    sent = rounds["bytes_down"] + rounds["bytes_up"]
    of_trials = sent.groupby([rounds[name] for name in TRIAL])
    return of_trials.cumsum() / 1e9


def _target_table(reached: pd.DataFrame, trials: pd.DataFrame, width: int) -> str:
    """Return a table of mean ± sd over the trials of each group, and of how many trials `reached` the target."""
    rows = reached.merge(trials[[*TRIAL, *_GROUP]], on=TRIAL)
    columns: dict[str, list[str]] = {}
    for (_, algorithm, hyperparameters), group in rows.groupby(_GROUP):
        gigabytes = group["gigabytes"]
        decimals = _gigabyte_decimals(gigabytes.mean())
        seconds = group["clock_seconds"].astype(float)
        cells = {
            "algorithm": algorithm,
            "hyperparameters": hyperparameters,
            "rounds": _mean_text(group["round"], 1),
            "GB": _mean_text(gigabytes, decimals),
            "clock": _mean_text(seconds, 1),
            "reached": f"{group['round'].count()} of {len(group)}",
        }
        for name, cell in cells.items():
            columns.setdefault(name, []).append(cell)
    if rows["clock_seconds"].isna().all():
        del columns["clock"]
    if not any(columns["hyperparameters"]):
        del columns["hyperparameters"]
    return plain_table(columns, left=("algorithm", "hyperparameters"), width=width)


def _gigabyte_decimals(mean: float) -> int:
    """Return three decimals, or as many as show three digits of what a small model sends."""
    if not mean > 0:
        return 3
    return max(3, 2 - math.floor(math.log10(mean)))


def _mean_text(values: pd.Series, decimals: int) -> str:
    values = values.dropna()
    if values.empty:
        return "never"
    mean = f"{values.mean():.{decimals}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {values.std():.{decimals}f}"
