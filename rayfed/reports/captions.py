"""Words that every table and plot of results uses: rules, units, and what the repetitions are over."""

import pandas as pd

from rayfed.records.metric_names import is_fraction
from rayfed.reports.hyperparameter_groups import LEFT_OUT

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
    """Return what a mean is over: "mean over clients", or over the server's values where no client has any.

    Args:
        counts: what `count_scores` returns, of one experiment.
        trials: the table `trials`, of the same experiment.
        split: the split of the values.
        metric: their metric.
    """
    if is_of_server(counts, split, metric):
        return "mean over the server's values"
    return f"mean over {clients_scored(trials) or 'clients'}"


def clients_scored(trials: pd.DataFrame) -> str:
    """Return "a fixed sample of 1000 clients" where not all clients were scored, else ""."""
    sizes = sorted({int(size) for size in trials.get("clients_scored", pd.Series(dtype=int)).dropna()})
    return f"a fixed sample of {_counted(sizes, 'client')}" if sizes else ""


def is_of_server(counts: pd.DataFrame, split: str, metric: str) -> bool:
    """Return whether no client has a value of `metric` on `split`; `counts` are of one experiment."""
    clients = counts.loc[(counts["split"] == split) & (counts["metric"] == metric), "clients"]
    return bool(clients.eq(0).all())


def repetitions(trials: pd.DataFrame) -> str:
    """Return what varied between the trials of a method, in words: "3 seeds, 3 partitions", or "1 seed".

    Args:
        trials: the trials that count, of one experiment: columns order, seed, partition_hash, leave_out.
    """
    seeds = sorted(trials.groupby("order")["seed"].nunique().unique())
    words = _counted(seeds, "seed")
    if "partition_hash" not in trials or trials["partition_hash"].isna().any():
        return words  # results from before it was recorded
    left_out = trials[LEFT_OUT].fillna("") if LEFT_OUT in trials else ""
    per_domain = trials.assign(domain=left_out).groupby(["order", "domain"])["partition_hash"].nunique()
    return f"{words}, {_counted(sorted(per_domain.unique()), 'partition')}"


def mean_caption(trials: pd.DataFrame) -> str:
    """Return what the numbers of a table are: "mean ± sd over 3 seeds, 3 partitions", or "1 seed, 1 partition"."""
    words = repetitions(trials)
    scored = "".join(f", {of_clients}" for of_clients in [clients_scored(trials)] if of_clients)
    return f"{words if words.startswith('1 seed,') or words == '1 seed' else f'mean ± sd over {words}'}{scored}"


def _counted(numbers: list[int], noun: str) -> str:
    if len(numbers) == 1:
        return f"{numbers[0]} {noun}{'' if numbers[0] == 1 else 's'}"
    return f"{numbers[0]} to {numbers[-1]} {noun}s"
