"""Reading the results of one experiment, or of all in a folder, also while trials still write."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion
from rayfed.core.records import POINTS
from rayfed.records.files import read_compressed, read_parquet
from rayfed.records.metric_names import default_metric
from rayfed.records.owners import is_alive
from rayfed.records.schema import EVENTS_SCHEMA, ROUNDS_SCHEMA
from rayfed.records.storage import Storage, is_url, one_line, open_storage, storage_errors
from rayfed.records.trials import read_trials, trials_table
from rayfed.reports.countable import countable_trials
from rayfed.reports.hyperparameter_groups import group_trials
from rayfed.reports.selection import TRIAL
from rayfed.reports.trial_scores import TrialScores

TABLES = ("metrics", "rounds", "trials")


class Tables:
    """The three tables as data frames: `metrics`, `rounds` and `trials`, in this order where it is unpacked.

    Reports read `curves`, `counts` and `scores`, since `metrics` may be too large to be put together.

    Attributes:
        scores: the rows of `metrics` by trial.
        rounds, trials: the other two tables.
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
        """The metric of each experiment that chooses rounds and hyperparameters, and that is shown by default."""
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
        return countable_trials(self.trials, self.groups, self.counts, self.criteria)

    @cached_property
    def points_to_show(self) -> dict[tuple[str, int], str]:
        """The point to show by (experiment, order).

        It is the one at which the algorithm's paper evaluates (`default_eval_point` in `trials`), otherwise the first.
        It may differ between hyperparameters: DBE without its bias is scored as a global model.
        """
        groups = self.groups.sort_values(["started", "trial"], kind="stable")[[*TRIAL, "order"]]
        present = self.counts[~self.counts["unseen"]].drop_duplicates([*TRIAL, "point"]).merge(groups, on=TRIAL)
        points: dict[tuple[str, int], str] = {}
        for (experiment, order), group in present.groupby(["experiment", "order"]):
            points[str(experiment), int(order)] = min(group["point"], key=POINTS.index)
        declared = groups.merge(self.trials[[*TRIAL, "default_eval_point"]], on=TRIAL).dropna()
        for experiment, order, point in zip(
            declared["experiment"], declared["order"], declared["default_eval_point"], strict=True
        ):
            points[experiment, order] = point
        return points


def selection_metrics(trials: pd.DataFrame, scores: pd.DataFrame) -> dict[str, str]:
    """Return the metric of each experiment that chooses rounds and hyperparameters, and that is shown by default.

    It is the one that all trials were told; accuracy, or loss where there is none, if they differ or do not know.

    Args:
        trials: the table `trials`.
        scores: columns experiment, split, point and metric, from the table `metrics`.
    """
    named = trials.groupby("experiment")["selection_metric"].agg(lambda values: sorted(set(values.dropna())))
    return {
        str(experiment): metrics[0] if len(metrics) == 1 else default_metric(scores[scores["experiment"] == experiment])
        for experiment, metrics in named.items()
    }


def read(folder: str | Path, experiment: str | None = None, *, select: str | None = None) -> Tables:
    """Return the tables of `experiment`, or of every experiment in `folder`; tables without rows have all columns.

    In `trials`, the status of a trial that no process runs any more, although it never ended, is `lost`.

    Args:
        select: the metric that chooses rounds and hyperparameters, in place of the trials' own.

    Raises:
        UsageError: the folder has no results, or none of `experiment`, or no validation values of `select`, or results
            with another schema.
        StorageError: a file is damaged, or the disk or the object store fails.
    """
    with storage_errors(str(folder)):
        homes = _homes(folder, experiment)
        scores = [one for home in homes for one in _scores_of(home)] or [TrialScores([])]
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
    return Tables([one for one in tables.scores if (one.counts["experiment"] == name).any()], rounds, trials)


def read_events(folder: str | Path, experiment: str | None = None) -> pd.DataFrame:
    """Return what happened to the processes of the trials of `experiment`, or of every experiment in `folder`.

    There is a row for each `Event`, with the columns that name the trial, in the order in which they happened.

    Raises:
        UsageError: the folder has no results, or none of `experiment`.
    """
    with storage_errors(str(folder)):
        frames = _read_all(_homes(folder, experiment), "events")
    events = pd.concat(frames or [EVENTS_SCHEMA.empty_table().to_pandas()], ignore_index=True)
    return events.sort_values("time", ignore_index=True, kind="stable")


def _homes(folder: str | Path, experiment: str | None) -> list[Storage]:
    names = list_experiments(folder)
    if experiment is not None:
        if experiment not in names:
            near = suggestion(experiment, names)
            raise UsageError(f"experiment={experiment}: no such experiment in {folder}; {near}")
        names = [experiment]
    return [open_storage(folder).child(name) for name in names]


def list_experiments(folder: str | Path) -> list[str]:
    """Return the names of the experiments in `folder`, sorted.

    Raises:
        UsageError: there are none.
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
    if not found:
        raise UsageError(f"{folder}: no such folder of results")
    if not names:
        raise UsageError(f"{folder}: no results in it; give the folder that runs write to, as in results={folder}")
    return names


def _scores_of(home: Storage) -> list[TrialScores]:
    """Return the scores of each trial that has any; its files are named `<trial>-<number>.parquet`."""
    folder, contents = home.child("metrics"), dict[str, list[bytes]]()
    for file in _files(home, "metrics"):
        contents.setdefault(file.rpartition("-")[0], []).append(read_compressed(folder, file))
    return [TrialScores(files) for files in contents.values()]


def _read_all(homes: Iterable[Storage], name: str) -> list[pd.DataFrame]:
    """Return a table of each experiment that has files of it."""
    return [table for home in homes if (table := _read(home, name)) is not None]


def _read(home: Storage, name: str) -> pd.DataFrame | None:
    folder, files = home.child(name), _files(home, name)
    if not files:
        return None
    return pa.concat_tables([read_parquet(folder, file) for file in files]).to_pandas()


def _files(home: Storage, name: str) -> list[str]:
    return sorted(file for file in home.child(name).files() if file.endswith(".parquet") and file[0] not in "._")


def _with_lost(rows: list[dict[str, Any]], home: Storage) -> list[dict[str, Any]]:
    """Return `rows` with the status `lost` for those that run according to the table, but have no owner."""
    owners = {row["owner"] for row in rows if row["status"] == "running" and row["owner"]}
    dead = {owner for owner in owners if is_alive(home, owner) is False}
    return [row | {"status": "lost"} if row["status"] == "running" and row["owner"] in dead else row for row in rows]
