"""Notes for the reader where trials, or clients, were scored in different rounds, so that rounds do not compare."""

import pandas as pd

from rayfed.core.records import SERVER
from rayfed.reports.selection import BEST, TRIAL

_EVERY = "evaluate.every"
DIFFERENT_CLIENTS = (
    "rounds were scored on different clients (evaluate.clients=selected, or the point trained), so a rule that "
    "compares rounds also compares clients; --rule final does not."
)


def evaluation_interval_notes(trials: pd.DataFrame) -> list[str]:
    """Return a note for each experiment whose `trials` differ in `evaluate.every`."""
    notes = []
    for experiment, group in trials.groupby("experiment"):
        intervals = sorted(group[_EVERY].dropna().astype(int).unique()) if _EVERY in group else []
        if len(intervals) > 1:
            notes.append(
                f"{experiment}: trials differ in evaluate.every ({' and '.join(map(str, intervals))}). Trials that are "
                "scored more often have more rounds to pick from, so selected, oracle, best5 and --target do not "
                "compare them fairly; final does."
            )
    return notes


def missing_values_notes(metrics: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment, split and metric with values that are NaN, which no mean contains.

    Args:
        metrics, rows: as in `scored_clients_notes`.
    """
    scores = _shown(metrics, rows)
    notes = []
    for (experiment, split, metric), group in scores.groupby(["experiment", "split", "metric"]):
        if len(missing := group[group["value"].isna()]):
            notes.append(
                f"{experiment}: {len(missing)} of {len(group)} values of {split} {metric} are NaN (of "
                f"{', '.join(sorted(missing['algorithm'].unique()))}). Means leave them out, and rounds in which there "
                "is no other value do not count as evaluated."
            )
    return notes


def few_rounds_notes(metrics: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment with trials of fewer than five scored rounds, which `best5` averages.

    Args:
        metrics, rows: as in `scored_clients_notes`.
    """
    scores = _shown(metrics, rows)
    rounds = scores[scores["value"].notna()].groupby(TRIAL)["round"].nunique()
    return [
        f"{experiment}: trials have as few as {fewest} scored round{'s' * (fewest > 1)}; best5 is then their mean."
        for experiment, fewest in rounds[rounds < BEST].groupby("experiment").min().items()
    ]


def scored_clients_notes(metrics: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment in which other clients were scored in other rounds.

    Args:
        metrics: the table `metrics`.
        rows: what is shown (experiment, algorithm, point, split, metric); only its values matter.
    """
    different = _on_different_clients(_shown(metrics, rows), TRIAL)
    return [f"{name}: {DIFFERENT_CLIENTS}" for name in sorted(different["experiment"].unique())]


def _shown(metrics: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the values of the participants that `rows` summarise."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    return metrics[~metrics["unseen"]].merge(rows[keys].drop_duplicates(), on=keys)


def _on_different_clients(scores: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    """Return the groups of `scores` by the columns `by` in which other clients were scored in other rounds."""
    scores = scores[(scores["client"] != SERVER) & scores["value"].notna()]
    per_round = scores.groupby([*by, "round"])["client"].agg(frozenset).reset_index()
    cohorts = per_round.groupby(by)["client"].nunique().reset_index()
    return cohorts[cohorts["client"] > 1]
