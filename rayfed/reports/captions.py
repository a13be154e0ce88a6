"""Words beside every table and plot of results: rules, units, what means are over, and notes on the scores."""

import pandas as pd

from rayfed.records.metric_names import is_fraction
from rayfed.reports.selection import BEST, TRIAL
from rayfed.reports.trial_groups import LEFT_OUT

RULE_CAPTIONS = {
    "final": "at the last evaluated round",
    "selected": "at the round with the best mean validation {criterion}",
    "oracle": "ORACLE: at the best round on this very split, which no honest protocol can know",
    "best5": "BEST FIVE: the mean of each column's five best rounds, chosen on this very split as an oracle would",
}


def unit(metric: str) -> str:
    """Return ", %" for metrics that are shown in percent."""
    return ", %" if is_fraction(metric) else ""


def average_words(counts: pd.DataFrame, trials: pd.DataFrame, split: str, metric: str) -> str:
    """Return what a mean of `metric` on `split` is over: "mean over clients", or over the server's values.

    Args:
        counts: what `count_scores` returns, of one experiment.
        trials: the table `trials`, of the same experiment.
        split, metric: the split and the metric.
    """
    if is_of_server(counts, split, metric):
        return "mean over the server's values"
    return f"mean over {_clients_scored(trials) or 'clients'}"


def is_of_server(counts: pd.DataFrame, split: str, metric: str) -> bool:
    """Return whether no client has a value of `metric` on `split`; `counts` are of one experiment."""
    clients = counts.loc[(counts["split"] == split) & (counts["metric"] == metric), "clients"]
    return bool(clients.eq(0).all())


def mean_caption(trials: pd.DataFrame) -> str:
    """Return what the numbers of a table are: "mean ± sd over 3 seeds, 3 partitions", or "1 seed, 1 partition".

    Args:
        trials: the trials that count, of one experiment: columns order, seed, partition_hash, leave_out.
    """
    seeds = sorted(trials.groupby("order")["seed"].nunique().unique())
    words = _counted(seeds, "seed") if seeds == [1] else f"mean ± sd over {_counted(seeds, 'seed')}"
    if "partition_hash" in trials and trials["partition_hash"].notna().all():
        left_out = trials[LEFT_OUT].fillna("") if LEFT_OUT in trials else ""
        per_domain = trials.assign(domain=left_out).groupby(["order", "domain"])["partition_hash"].nunique()
        words += f", {_counted(sorted(per_domain.unique()), 'partition')}"
    return ", ".join(filter(None, [words, _clients_scored(trials)]))


def _clients_scored(trials: pd.DataFrame) -> str:
    """Return "a fixed sample of 1000 clients" if not all clients were scored, else ""."""
    sizes = sorted({int(size) for size in trials.get("clients_scored", pd.Series(dtype=int)).dropna()})
    return f"a fixed sample of {_counted(sizes, 'client')}" if sizes else ""


def _counted(numbers: list[int], noun: str) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]} {noun}{'' if numbers[0] == 1 else 's'}"
    return f"{numbers[0]} to {numbers[-1]} {noun}s"


def score_notes(counts: pd.DataFrame, rows: pd.DataFrame, rule: str) -> list[str]:
    """Return notes on NaN values, and on rounds that `rule` cannot compare fairly.

    Args:
        counts: what `count_scores` returns.
        rows: what is shown: columns experiment, algorithm, point, split, metric.
        rule: the rule that picks the round.
    """
    scores, notes = _shown(counts, rows), []
    for (experiment, split, metric), group in scores.groupby(["experiment", "split", "metric"]):
        values, missing = group["values"].sum(), group["missing"].sum()
        if missing:
            algorithms = ", ".join(sorted(group.loc[group["missing"] > 0, "algorithm"].unique()))
            notes.append(
                f"{experiment}: {missing} of {values} values of {split} {metric} are NaN (of {algorithms}). Means "
                "leave them out, and rounds in which there is no other value do not count as evaluated."
            )
    if rule != "final":
        notes += scored_clients_notes(counts, rows)
    if rule == "best5":
        rounds = scores[scores["values"] > scores["missing"]].groupby(TRIAL)["round"].nunique()
        notes += [
            f"{experiment}: trials have as few as {fewest} scored round{'s' * (fewest > 1)}; best5 is then their mean."
            for experiment, fewest in rounds[rounds < BEST].groupby("experiment").min().items()
        ]
    return notes


def scored_clients_notes(counts: pd.DataFrame, rows: pd.DataFrame) -> list[str]:
    """Return a note on each experiment in which the scored clients differ between rounds; see `score_notes`."""
    scores = _shown(counts, rows)
    cohorts = scores[scores["cohort"] != 0].groupby([*TRIAL, "point", "split", "metric"])["cohort"].nunique()
    different = cohorts[cohorts > 1].index.get_level_values("experiment")
    return [
        f"{name}: rounds were scored on different clients (evaluate.clients=selected, or the point trained), so a rule "
        "that compares rounds also compares clients; --rule final does not."
        for name in sorted(different.unique())
    ]


def _shown(counts: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the counts of the participants' scores that `rows` summarise."""
    keys = ["experiment", "algorithm", "point", "split", "metric"]
    return counts[~counts["unseen"]].merge(rows[keys].drop_duplicates(), on=keys)
