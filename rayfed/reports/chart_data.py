"""What figures and the HTML page draw charts from: values of clients, times, partitions and maps."""

import io
import re
from typing import NamedTuple

import numpy as np
import pandas as pd

from rayfed.core.records import SECONDS
from rayfed.records.holdings import read_holdings
from rayfed.records.storage import Storage
from rayfed.reports.hyperparameter_groups import format_value
from rayfed.reports.read import Tables
from rayfed.reports.selection import CLIENT, TRIAL
from rayfed.reports.summary import SCORE, seed_values
from rayfed.reports.trial_scores import picked_values

ROUND_PARTS = (*(part for part in SECONDS if part != "total"), "other")
"""The parts of a round's wall-clock time; `other` is what the measured parts leave of the total."""
_KEYS_WITHOUT_DOT = ("cohort", "cohort_share", "rounds", "batch_norm", "unseen_clients", "unseen_share")
_MAP_FILE = re.compile(
    r"(?P<trial>.+)-round(?P<round>\d+)-(?P<name>[^-]+)-(?P<point>[^-]+)-(?P<split>[^-]+)-(?P<layer>.*)\.parquet"
)


class Partition(NamedTuple):
    """Who holds how many examples for training and validation.

    Attributes:
        digest: its hash.
        seed: the seed that it was drawn with; None where the partition is not random.
        trials: the names of the trials that had it.
        clients: the numbers of the clients.
        domains: the domain of each client.
        counts: int64 [clients, classes].
    """

    digest: str
    seed: int | None
    trials: list[str]
    clients: list[int]
    domains: list[str]
    counts: np.ndarray


def varying_keys(rows: pd.DataFrame) -> list[str]:
    """Return the configuration keys with two values or more for some algorithm, of rows with a column for each key.

    Null is a value, too.
    """
    known = [name for name in rows.columns if "." in name or name in _KEYS_WITHOUT_DOT]
    return [name for name in known if (setting_texts(rows, name).groupby(rows["algorithm"]).nunique() > 1).any()]


def setting_texts(rows: pd.DataFrame, key: str) -> pd.Series:
    """Return the values of a configuration key as text, "none" for null, as tables show it."""
    return rows[key].map(lambda value: format_value(value)).astype(str)


def client_scores(tables: Tables, metric: str, split: str) -> pd.DataFrame:
    """Return the mean over seeds of each participant's values on one split, a row per method, point, rule and client.

    The columns are experiment, algorithm, order, `SCORE` without quantity, client, domain ("" where it has none), value
    and the number of seeds. Where trials leave out one domain each, a client of one number holds different domains, and
    there is a row for each of them. A rule picks the round of a trial as in the tables of results, except that `best5`
    takes each client's own best rounds.
    """
    done = tables.done
    rows = picked_values(tables.scores, done, metric, split, tables.criteria)
    rows = rows[rows["quantity"].str.startswith(CLIENT) & (rows["metric"] == metric) & (rows["split"] == split)]
    rows = rows.assign(client=rows["quantity"].str.removeprefix(CLIENT).astype(int))
    score = [*SCORE, "client", "domain"]
    seeds = seed_values(rows, done, score)
    means = seeds.groupby(["experiment", "order", *score])["value"].agg(value="mean", seeds="count").reset_index()
    algorithms = done[["order", "algorithm"]].drop_duplicates("order")
    return means.merge(algorithms, on="order").drop(columns="quantity")


def most_partitions(tables: Tables) -> int:
    """Return the largest number of partitions over which a method's values are means; 0 if nothing is done."""
    done = tables.done
    if done.empty or "partition_hash" not in tables.trials:
        return 0
    hashes = done.merge(tables.trials[[*TRIAL, "partition_hash"]], on=TRIAL)
    return int(hashes.groupby("order")["partition_hash"].nunique().max())


def round_seconds(rounds: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the mean wall-clock seconds of a round: a row per order, a column for each of `ROUND_PARTS`.

    Setup and the final stage are shared among the rounds. `trials` has the columns `TRIAL` and order.
    """
    columns = [f"seconds_{part}" for part in ROUND_PARTS if part != "other"]
    rounds = rounds.merge(trials[[*TRIAL, "order"]], on=TRIAL)
    number = rounds[rounds["stage"] == "round"].groupby("order").size()
    means = rounds.groupby("order")[[*columns, "seconds_total"]].sum().div(number, axis=0).dropna(how="all")
    means["seconds_other"] = (means["seconds_total"] - means[columns].sum(axis=1)).clip(lower=0)
    return means.drop(columns="seconds_total").rename(columns=lambda name: name.removeprefix("seconds_"))


def recorded_partitions(home: Storage, trials: pd.DataFrame) -> list[Partition]:
    """Return the distinct partitions of `trials` that were recorded in the folder of the experiment, by seed."""
    if "partition_hash" not in trials:
        return []
    partitions = []
    for digest, group in (
        trials.dropna(subset="partition_hash").sort_values("seed").groupby("partition_hash", sort=False)
    ):
        if (holdings := read_holdings(home, str(digest))) is None:
            continue
        seed = group["partition_seed"].iloc[0] if "partition_seed" in group else None
        clients, domains, counts = _counts(holdings[holdings["split"] != "test"])
        partitions.append(
            Partition(
                digest=str(digest),
                seed=None if seed is None or pd.isna(seed) else int(seed),
                trials=list(group["trial"]),
                clients=clients,
                domains=domains,
                counts=counts,
            )
        )
    return partitions


def _counts(holdings: pd.DataFrame) -> tuple[list[int], list[str], np.ndarray]:
    table = holdings.pivot_table(index="client", columns="label", values="count", aggfunc="sum", fill_value=0)
    table = table.reindex(columns=range(int(holdings["label"].max()) + 1), fill_value=0)
    domains = holdings.drop_duplicates("client").set_index("client")["domain"]
    return [int(client) for client in table.index], [str(domains[client]) for client in table.index], table.to_numpy()


def last_maps(home: Storage, trials: pd.DataFrame) -> pd.DataFrame:
    """Return the last map of representations of each method's first seed, for each model, split and layer.

    Args:
        home: the folder of the experiment.
        trials: the trials that count, with the columns trial, order and seed.

    Returns:
        The columns of `trials` with round, point, split, layer and file; no rows where nothing was written.
    """
    names = home.child("maps").files()
    files = pd.DataFrame(
        [{**match.groupdict(), "file": match[0]} for name in names if (match := _MAP_FILE.fullmatch(name))],
        columns=["trial", "round", "name", "point", "split", "layer", "file"],
    )
    files = files.assign(round=files["round"].astype(int)).merge(trials, on="trial")
    files = files.sort_values(["order", "seed", "round"], ascending=[True, True, False], kind="stable")
    return files.drop_duplicates(["order", "point", "split", "layer"], ignore_index=True)


def read_map(home: Storage, file: str) -> pd.DataFrame:
    """Return the points of a map: columns client, domain, label, x and y."""
    return pd.read_parquet(io.BytesIO(home.child("maps").read(file)))
