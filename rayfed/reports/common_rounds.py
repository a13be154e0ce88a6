"""Notes for the reader where trials, or clients, were scored in different rounds, so that rounds do not compare."""

import pandas as pd

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


def missing_values_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment, split and metric with values that are NaN, which no mean contains.

    Args:
        counts, rows: as in `scored_clients_notes`.
    """
    scores = _shown(counts, rows)
    notes = []
    for (experiment, split, metric), group in scores.groupby(["experiment", "split", "metric"]):
        values, missing = group["values"].sum(), group["missing"].sum()
        if missing:
            algorithms = ", ".join(sorted(group.loc[group["missing"] > 0, "algorithm"].unique()))
            notes.append(
                f"{experiment}: {missing} of {values} values of {split} {metric} are NaN (of {algorithms}). Means "
                "leave them out, and rounds in which there is no other value do not count as evaluated."
            )
    return notes


def few_rounds_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment with trials of fewer than five scored rounds, which `best5` averages.

    Args:
        counts, rows: as in `scored_clients_notes`.
    """
    scores = _shown(counts, rows)
    rounds = scores[scores["values"] > scores["missing"]].groupby(TRIAL)["round"].nunique()
    return [
        f"{experiment}: trials have as few as {fewest} scored round{'s' * (fewest > 1)}; best5 is then their mean."
        for experiment, fewest in rounds[rounds < BEST].groupby("experiment").min().items()
    ]


def scored_clients_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note for each experiment in which other clients were scored in other rounds.

    Args:
        counts: what `count_scores` returns.
        rows: what is shown (experiment, algorithm, point, split, metric); only its values matter.
    """
    scores = _shown(counts, rows)
    cohorts = scores[scores["cohort"] != 0].groupby([*TRIAL, "point", "split", "metric"])["cohort"].nunique()
    different = cohorts[cohorts > 1].index.get_level_values("experiment")
    return [f"{name}: {DIFFERENT_CLIENTS}" for name in sorted(different.unique())]


def _shown(counts: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of the participants' scores that `rows` summarise."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    return counts[~counts["unseen"]].merge(rows[keys].drop_duplicates(), on=keys)
