"""Rounds, gigabytes and simulated seconds that trials need to reach a target."""

import math
import textwrap

import pandas as pd

from rayfed.core.errors import UsageError
from rayfed.core.records import is_fraction
from rayfed.core.terminal import plain_table
from rayfed.reports.read import Tables
from rayfed.reports.selection import TRIAL, comparable
from rayfed.reports.summary import View, average_words, filter_rows, scored_clients_notes


def target_text(tables: Tables, target: float, view: View, *, width: int) -> str:
    """Return a table for each experiment: the rounds and gigabytes until the mean over clients reaches `target`.

    Raises:
        UsageError: The metric cannot have this target, or there are no such values.
    """
    done, curves = tables.done, tables.curves
    group = ["algorithm", "hyperparameters", "order"]
    means = curves[curves["quantity"] == "mean"].merge(done[[*TRIAL, *group]], on=TRIAL)
    means = filter_rows(means, tables, view)
    parts = []
    for experiment, rows in means.groupby("experiment"):
        split, metric = str(rows["split"].iloc[0]), str(rows["metric"].iloc[0])
        if target != target or (is_fraction(metric) and not 0 <= target <= 1):
            raise UsageError(f"target={target:g}: {metric} is a fraction of 1; give a number from 0 to 1, such as 0.8")
        counts, trials = (table[table["experiment"] == experiment] for table in (tables.counts, tables.trials))
        side = "at least" if rows["higher_is_better"].iloc[0] else "at most"
        title = (
            f"{experiment}: first evaluated round whose {split} {metric}, "
            f"{average_words(counts, trials, split, metric)}, is {side} {target:g}, and GB "
            "(10⁹ bytes, down and up, including the setup) sent until its end, at the simulated seconds 'clock', "
            "if any; mean ± sd over the runs that reached it"
        )
        parts += [textwrap.fill(title, width), _target_table(rounds_to_target(rows, tables, target), done, width)]
    parts += [textwrap.fill(note, width) for note in scored_clients_notes(tables.counts, means)]
    return "\n\n".join(parts)


def rounds_to_target(means: pd.DataFrame, tables: Tables, target: float) -> pd.DataFrame:
    """Return one row per trial: experiment, trial, round, gigabytes, clock_seconds.

    `round` is the first evaluated round whose value is at least `target` (at most, where lower is better). `gigabytes`
    (10⁹ bytes) counts everything sent down and up until its end, including the setup. All are NaN if the target was
    never reached. `means` has a row per trial and evaluated round: experiment, trial, round, higher_is_better, value.
    """
    gap = comparable(means["value"]) - target
    tolerance = 1e-11 * abs(target)  # a mean that misses the target by a rounding error has reached it
    enough = means[(gap >= -tolerance).where(means["higher_is_better"], gap <= tolerance)]
    first = enough.groupby(TRIAL)["round"].min().reset_index()
    trials = means[TRIAL].drop_duplicates().merge(first, on=TRIAL, how="left")
    rounds = tables.rounds.sort_values("round")
    sent = rounds[[*TRIAL, "round", "clock_seconds"]].assign(gigabytes=gigabytes_sent(rounds))
    return trials.merge(sent, on=[*TRIAL, "round"], how="left")


def gigabytes_sent(rounds: pd.DataFrame) -> pd.Series:
    """Return the gigabytes (10⁹ bytes) sent until the end of each round, the setup included; `rounds` are sorted."""
    return (rounds["bytes_down"] + rounds["bytes_up"]).groupby([rounds[name] for name in TRIAL]).cumsum() / 1e9


def _target_table(reached: pd.DataFrame, trials: pd.DataFrame, width: int) -> str:
    """Return a table of mean ± sd over the trials of each group, and of how many trials `reached` the target."""
    rows = reached.merge(trials[[*TRIAL, "order", "algorithm", "hyperparameters"]], on=TRIAL)
    names = ("algorithm", "hyperparameters", "rounds", "GB", "clock", "reached")
    columns: dict[str, list[str]] = {name: [] for name in names}
    for (_, algorithm, hyperparameters), group in rows.groupby(["order", "algorithm", "hyperparameters"]):
        gigabytes = group["gigabytes"].mean()
        # three decimals, or as many as show three digits of what a small model sends
        decimals = max(3, 2 - math.floor(math.log10(gigabytes))) if gigabytes > 0 else 3
        counted = f"{group['round'].count()} of {len(group)}"
        clock = _mean_text(group["clock_seconds"].astype(float), 1)
        texts = _mean_text(group["round"], 1), _mean_text(group["gigabytes"], decimals), clock, counted
        for column, cell in zip(columns.values(), (algorithm, hyperparameters, *texts), strict=True):
            column.append(cell)
    if rows["clock_seconds"].isna().all():
        del columns["clock"]
    if not any(columns["hyperparameters"]):
        del columns["hyperparameters"]
    return plain_table(columns, left=("algorithm", "hyperparameters"), width=width)


def _mean_text(values: pd.Series, decimals: int) -> str:
    values = values.dropna()
    if values.empty:
        return "never"
    spread = f" ± {values.std():.{decimals}f}" if len(values) > 1 else ""
    return f"{values.mean():.{decimals}f}{spread}"
