"""Whether rounds can be compared with each other: what to say where trials, or clients, were scored at other rounds."""

import pandas as pd

from rayfed.results.selection import TRIAL
from rayfed.results.tables import SERVER

_EVERY = "evaluate.every"


def rounds_differ(trials: pd.DataFrame) -> list[str]:
    """A note for each experiment whose trials (experiment, evaluate.every, ...) were scored more and less often."""
    notes = []
    for experiment, group in trials.groupby("experiment"):
        found = sorted(group[_EVERY].dropna().astype(int).unique()) if _EVERY in group else []
        if len(found) > 1:
            said = " and ".join(map(str, found))
            notes.append(
                f"{experiment}: trials differ in evaluate.every ({said}); who is scored more often has more rounds to "
                "pick from, so selected, oracle, best5 and --target do not compare them alike; final does."
            )
    return notes


def clients_differ(metrics: pd.DataFrame, asked: pd.DataFrame) -> list[str]:
    """A note for each experiment where the values of `asked` (experiment, algorithm, point, split, metric) come from
    other clients in other rounds, so that a rule that compares rounds compares clients, too."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    rows = metrics[~metrics["unseen"] & (metrics["client"] != SERVER) & metrics["value"].notna()]
    rows = rows.merge(asked[keys].drop_duplicates(), on=keys)
    per_round = rows.groupby([*TRIAL, "round"])["client"].agg(frozenset).reset_index()
    sets = per_round.groupby(TRIAL)["client"].nunique()
    return [
        f"{experiment}: rounds were scored on different clients (evaluate.clients=selected, or the point trained), and "
        "a rule that compares rounds compares these, too; --rule final compares none."
        for experiment in sorted({experiment for experiment, _ in sets[sets > 1].index})
    ]
