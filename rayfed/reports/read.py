"""Reading the results of one experiment, or of all experiments in a folder, also while trials still write.

The scores of a large sweep would take gigabytes as data frames. Reports show means over clients, and values of clients
only in a few rounds. Both follow from the scores of one trial at a time, so all files stay compressed in memory.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.records import POINTS, SERVER
from rayfed.records.files import EVENTS_SCHEMA, METRICS_SCHEMA, ROUNDS_SCHEMA, decompressed, read_checked, read_parquet
from rayfed.records.storage import Storage, is_url, one_line, open_storage, storage_errors
from rayfed.records.trials import is_alive, read_trials, trials_table
from rayfed.reports.selection import TRIAL, aggregate_clients, countable_trials, group_trials

TABLES = ("metrics", "rounds", "trials")
_STRINGS = [field.name for field in METRICS_SCHEMA if pa.types.is_string(field.type)]
_NO_ROWS = METRICS_SCHEMA.empty_table()
_COUNTED = [*TRIAL, "algorithm", "unseen", "point", "split", "metric", "round"]


class TrialScores:
    """The rows of one trial in the table `metrics`; `files` are the contents that `read_checked` returned."""

    def __init__(self, files: Sequence[bytes]):
        self._files = files

    def rows(self) -> pa.Table:
        return pa.concat_tables([_NO_ROWS, *(decompressed(file) for file in self._files)])

    def frame(self) -> pd.DataFrame:
        """Return the rows with categories in place of strings."""
        tables = [decompressed(file, _STRINGS) for file in self._files] or [_NO_ROWS]
        return pa.concat_tables(tables).unify_dictionaries().to_pandas()

    @property
    def curves(self) -> pd.DataFrame:
        """What `aggregate_clients` returns."""
        return self._reduced[0]

    @property
    def counts(self) -> pd.DataFrame:
        """What `count_scores` returns."""
        return self._reduced[1]

    @cached_property
    def _reduced(self) -> tuple[pd.DataFrame, pd.DataFrame]:
        frame = self.frame()
        return _as_strings(aggregate_clients(frame)), _as_strings(count_scores(frame))


def count_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return which scores there are: one row per trial, model, split, metric and round of the table `metrics`.

    Further columns are the number of `values`, the number of NaN values (`missing`), the number of values of clients
    (`clients`), and `cohort`: a hash of the set of clients that have values other than NaN; 0 if there is no client.
    """
    group = metrics.groupby(_COUNTED, sort=False, observed=True).ngroup().rename("group")
    is_client, missing = metrics["client"] != SERVER, metrics["value"].isna()
    of_group = pd.DataFrame({"values": 1, "missing": missing, "clients": is_client}).groupby(group).sum()
    scored = pd.DataFrame({"group": group, "client": metrics["client"]})[is_client & ~missing].drop_duplicates()
    hashes = pd.Series(pd.util.hash_array(scored["client"].to_numpy()), scored["group"], dtype="uint64")
    cohort = hashes.groupby(level=0).sum().reindex(of_group.index, fill_value=0)  # a sum does not depend on the order
    return metrics.loc[~group.duplicated(), _COUNTED].reset_index(drop=True).assign(**of_group, cohort=cohort)


def _as_strings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `frame` with strings in place of categories."""
    categories = frame.select_dtypes("category")
    return frame.assign(**{name: column.astype(column.cat.categories.dtype) for name, column in categories.items()})


class Tables:
    """The three tables as data frames, which unpack as `metrics`, `rounds` and `trials`.

    Reports read `curves`, `counts` and `scores`, because `metrics` may not fit in memory.

    Attributes:
        scores: The rows of `metrics`, an item per trial.
        rounds, trials: The other two tables.
    """

    def __init__(self, scores: Sequence[TrialScores], rounds: pd.DataFrame, trials: pd.DataFrame):
        self.scores, self.rounds, self.trials = scores, rounds, trials

    def __iter__(self) -> Iterator[pd.DataFrame]:
        return iter((self.metrics, self.rounds, self.trials))

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The table `metrics`."""
        return pa.concat_tables([scores.rows() for scores in self.scores]).to_pandas()

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The clients of each round aggregated; see `aggregate_clients`."""
        return pd.concat([scores.curves for scores in self.scores], ignore_index=True)

    @cached_property
    def counts(self) -> pd.DataFrame:
        """Which scores there are; see `count_scores`."""
        return pd.concat([scores.counts for scores in self.scores], ignore_index=True)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The trials with their groups; see `group_trials`."""
        return group_trials(self.trials)

    @cached_property
    def criteria(self) -> dict[str, str]:
        """The metric of each experiment that chooses rounds and hyperparameters; see `selection_metrics`."""
        return selection_metrics(self.trials, self.counts)

    @property
    def done(self) -> pd.DataFrame:
        """The trials that count; see `countable_trials`."""
        return self._countable[0]

    @property
    def notes(self) -> list[str]:
        """Sentences on the trials that do not count."""
        return self._countable[1]

    @cached_property
    def _countable(self) -> tuple[pd.DataFrame, list[str]]:
        return countable_trials(self.trials, self.groups, self.criteria)

    @cached_property
    def points_to_show(self) -> dict[tuple[str, int], str]:
        """The point to show by (experiment, order).

        It is the point at which the algorithm's paper evaluates (`default_eval_point` in `trials`), or else the first
        point. It may differ between hyperparameters: DBE without its bias is scored as a global model.
        """
        groups = self.groups.sort_values(["started", "trial"], kind="stable")[[*TRIAL, "order"]]
        present = self.counts.loc[~self.counts["unseen"], [*TRIAL, "point"]].drop_duplicates().merge(groups, on=TRIAL)
        present = present.sort_values("point", key=lambda points: points.map(POINTS.index), ascending=False)
        declared = groups.merge(self.trials[[*TRIAL, "default_eval_point"]], on=TRIAL).dropna()
        points: dict[tuple[str, int], str] = {}  # the last row of a group counts
        for rows, column in ((present, "point"), (declared, "default_eval_point")):
            points |= {(row["experiment"], row["order"]): row[column] for row in rows.to_dict("records")}
        return points


def selection_metrics(trials: pd.DataFrame, scores: pd.DataFrame) -> dict[str, str]:
    """Return the metric of each experiment that chooses rounds and hyperparameters, and that is shown by default.

    It is the `selection_metric` of the table `trials`. If trials differ in it or have none, it is accuracy, or loss if
    `scores` (columns experiment, split, point and metric) have no accuracy, because labels are no classes.
    """
    of_training = (scores["split"] == "train") & (scores["point"] == "trained")
    present = scores[~of_training].groupby("experiment")["metric"].agg(set)
    named = trials.groupby("experiment")["selection_metric"].agg(lambda values: sorted(set(values.dropna())))
    return {
        str(experiment): metrics[0]
        if len(metrics) == 1
        else "loss"
        if {"loss", "accuracy"} & present.get(experiment, set()) == {"loss"}
        else "accuracy"
        for experiment, metrics in named.items()
    }


def read(folder: str | Path, experiment: str | None = None, *, select: str | None = None) -> Tables:
    """Return the tables of `experiment`, or of every experiment in `folder`; tables without rows have all columns.

    In `trials`, the status of a trial that never ended and that no process runs is `lost`.

    Args:
        folder: The folder of the results, a path or a URL.
        select: The metric that chooses rounds and hyperparameters, in place of the trials' own.

    Raises:
        UsageError: The folder has no results, or none of `experiment`, or no validation values of `select`, or results
            with another schema.
        StorageError: A file is damaged, or the disk or the object store fails.
    """
    with storage_errors(str(folder)):
        homes = _homes(folder, experiment)
        scores = [of_trial for home in homes for of_trial in _scores_of(home)] or [TrialScores([])]
        rounds = _read_all(homes, "rounds") or [ROUNDS_SCHEMA.empty_table().to_pandas()]
        trials = trials_table(row for home in homes for row in _with_lost(read_trials(home.child("trials")), home))
    tables = Tables(scores, pd.concat(rounds, ignore_index=True), trials.to_pandas())
    if select is None:
        return tables
    known = sorted(tables.counts.loc[tables.counts["split"] == "val", "metric"].unique())
    if select not in known:
        raise UsageError(f"select={select}: no such metric on validation data; {suggestion(select, known)}")
    return Tables(scores, tables.rounds, tables.trials.assign(selection_metric=select))


def of_experiment(tables: Tables, name: str) -> Tables:
    """Return the rows of one experiment."""
    rounds, trials = (
        table[table["experiment"] == name].reset_index(drop=True) for table in (tables.rounds, tables.trials)
    )
    return Tables([scores for scores in tables.scores if (scores.counts["experiment"] == name).any()], rounds, trials)


def read_events(folder: str | Path, experiment: str | None = None) -> pd.DataFrame:
    """Return a row for each `Event` of the trials of `experiment`, or of every experiment in `folder`, sorted by time.

    Raises:
        UsageError: The folder has no results, or none of `experiment`.
    """
    with storage_errors(str(folder)):
        frames = _read_all(_homes(folder, experiment), "events")
    events = pd.concat(frames or [EVENTS_SCHEMA.empty_table().to_pandas()], ignore_index=True)
    return events.sort_values("time", ignore_index=True, kind="stable")


def _homes(folder: str | Path, experiment: str | None) -> list[Storage]:
    names = list_experiments(folder)
    if experiment is not None:
        if experiment not in names:
            raise UsageError(
                f"experiment={experiment}: no such experiment in {folder}; {suggestion(experiment, names)}"
            )
        names = [experiment]
    return [open_storage(folder).child(name) for name in names]


def list_experiments(folder: str | Path) -> list[str]:
    """Return the names of the experiments in `folder`, sorted.

    Raises:
        UsageError: There are none.
    """
    storage = open_storage(folder)
    try:
        found = storage.exists()
        names = [name for name in storage.folders() if any(_files(storage.child(name), table) for table in TABLES)]
        if not names and any(_files(storage, name) for name in TABLES):
            parent, _, name = str(folder if is_url(folder) else Path(folder).resolve()).rstrip("/").rpartition("/")
            raise UsageError(f"{folder}: this is a single experiment; give {parent} --experiment {name}")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({one_line(error)})") from error
    if not names:
        what = "no results in it" if found else "no such folder of results"
        raise UsageError(f"{folder}: {what}; give the folder that runs write to, as in results={folder}")
    return names


def _scores_of(home: Storage) -> list[TrialScores]:
    """Return the scores of each trial that has any; its files are named `<trial>-<number>.parquet`."""
    folder, contents = home.child("metrics"), dict[str, list[bytes]]()
    for file in _files(home, "metrics"):
        contents.setdefault(file.rpartition("-")[0], []).append(read_checked(folder, file)[0])
    return [TrialScores(files) for files in contents.values()]


def _read_all(homes: Iterable[Storage], name: str) -> list[pd.DataFrame]:
    """Return the table `name` of each experiment that has its files."""
    return [
        pa.concat_tables([read_parquet(home.child(name), file) for file in files]).to_pandas()
        for home in homes
        if (files := _files(home, name))
    ]


def _files(home: Storage, name: str) -> list[str]:
    return sorted(file for file in home.child(name).files() if file.endswith(".parquet") and file[0] not in "._")


def _with_lost(rows: list[dict[str, Any]], home: Storage) -> list[dict[str, Any]]:
    """Return `rows` with the status `lost` for trials that run by the table, although their owner is dead."""
    owners = {row["owner"] for row in rows if row["status"] == "running" and row["owner"]}
    dead = {owner for owner in owners if is_alive(home, owner) is False}
    return [row | {"status": "lost"} if row["status"] == "running" and row["owner"] in dead else row for row in rows]
