"""Reading the results of one experiment, or of all experiments in a folder, also while trials still write.

The scores of a large sweep would take gigabytes as data frames. Reports show means over clients, and values of clients
only in a few rounds. Both follow from the scores of a few trials at a time, so all files stay compressed in memory.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.errors import UsageError, one_line, printable
from rayfed.core.options import suggestion
from rayfed.core.round_record import POINTS, SERVER
from rayfed.records.files import decompressed, read_checked, read_parquet
from rayfed.records.owners import is_alive
from rayfed.records.storage import Storage, is_url, open_storage, storage_errors
from rayfed.records.tables import EVENTS_SCHEMA, METRICS_SCHEMA, ROUNDS_SCHEMA, string_columns
from rayfed.records.trials import readable_trials, trials_table
from rayfed.reports.choice import BY_SEED, by_seed_notes, seed_notes, with_choices_by_seed
from rayfed.reports.groups import countable_trials, experiments_by_data, group_trials
from rayfed.reports.selection import TRIAL, aggregate_clients
from rayfed.reports.splits import Splits, splits_by_experiment

TABLES = ("metrics", "rounds", "trials")
_STRINGS = string_columns(METRICS_SCHEMA)
_SCHEMAS = {"rounds": ROUNDS_SCHEMA, "events": EVENTS_SCHEMA}
_OF_SEVERAL_LINES = ("traceback",)
_NO_ROWS = METRICS_SCHEMA.empty_table()
_ROWS_AT_ONCE = 200_000  # of several trials, which become data frames together
_COUNTED = [*TRIAL, "algorithm", "unseen", "point", "split", "metric", "round"]


class _Reduced(NamedTuple):
    """What reports read of all rounds of a trial: what `aggregate_clients` returns, and what `count_scores` returns."""

    curves: pd.DataFrame
    counts: pd.DataFrame


class TrialScores:
    """The rows of one trial in the table `metrics`, compressed.

    Args:
        files: The contents that `read_checked` returned.
        experiment: The name under which reports show the trial; None: its own.
    """

    def __init__(self, files: Sequence[bytes], experiment: str | None = None):
        self._files = files
        self._experiment = experiment
        self._reduced: _Reduced | None = None

    def renamed(self, experiments: Mapping[tuple[str, str], str]) -> "TrialScores":
        """Return the same scores under the name in `experiments`, by the experiment and the trial."""
        before = self.reduced
        for key in before.counts[TRIAL].head(1).itertuples(index=False, name=None):
            name = experiments.get(key)
            renamed = TrialScores(self._files, name)
            if name is not None:
                renamed._reduced = _Reduced(*(frame.assign(experiment=name) for frame in before))
            return renamed
        return self

    def rows(self) -> pa.Table:
        tables = []
        for file in self._files:
            tables.append(_printable(decompressed(file)))
        return pa.concat_tables([_NO_ROWS, *tables])

    def table(self) -> pa.Table:
        """Return the rows with categories in place of strings."""
        tables = []
        for file in self._files:
            tables.append(_printable(decompressed(file, _STRINGS)))
        table = pa.concat_tables(tables or [_NO_ROWS])
        if self._experiment is None:
            return table
        experiment = pa.array([self._experiment] * len(table), pa.string()).dictionary_encode()
        place = table.schema.get_field_index("experiment")
        return table.set_column(place, "experiment", experiment)

    def frame(self) -> pd.DataFrame:
        """Return the rows with categories in place of strings."""
        return _frame([self.table()])

    def of_clients(self, point: str, split: str, metric: str) -> pd.DataFrame:
        """Return the scores of participants at a point, on a split: columns client, domain, round and value."""
        rows = self.rows()
        is_shown = pc.and_(pc.greater_equal(rows["client"], 0), pc.invert(rows["unseen"]))
        for name, wanted in {"point": point, "split": split, "metric": metric}.items():
            is_shown = pc.and_(is_shown, pc.equal(rows[name], wanted))
        return rows.filter(is_shown).select(["client", "domain", "round", "value"]).to_pandas()

    @property
    def reduced(self) -> _Reduced:
        """The curves and counts of the trial."""
        if self._reduced is None:
            reduce_together([self])
        assert self._reduced is not None
        return self._reduced


def reduce_together(scores: Sequence[TrialScores]) -> None:
    """Compute `TrialScores.reduced` of many trials. pandas takes as long for ten rows as for thousands."""
    batch: dict[tuple[str, ...], TrialScores] = {}
    tables: list[pa.Table] = []
    for one in scores:
        if one._reduced is not None:
            continue
        table = one.table()
        names = _names_in(table)
        if len(names) != 1:
            one._reduced = _reduction([table])
            continue
        (name,) = names
        rows = sum(map(len, tables))
        if name in batch or rows + len(table) > _ROWS_AT_ONCE:
            _reduce_batch(batch, tables)
            batch = {}
            tables = []
        batch[name] = one
        tables.append(table)
    _reduce_batch(batch, tables)


def _names_in(table: pa.Table) -> set[tuple[str, ...]]:
    """Return the experiments and trials that rows belong to: those of one trial, in files that rayfed wrote."""
    columns = [table.column(name).unique().to_pylist() for name in TRIAL]
    return set(itertools.product(*columns))


def _reduce_batch(batch: Mapping[tuple[str, ...], TrialScores], tables: Sequence[pa.Table]) -> None:
    """Compute the reductions of trials by their names, from their rows."""
    if not batch:
        return
    reduction = _reduction(tables)
    parts = []
    for frame in reduction:
        of_trial = {}
        for name, rows in frame.groupby(TRIAL, sort=False):
            of_trial[name] = rows.reset_index(drop=True)
        parts.append((of_trial, frame.head(0)))
    for name, one in batch.items():
        one._reduced = _Reduced(*(of_trial.get(name, nothing) for of_trial, nothing in parts))


def _reduction(tables: Sequence[pa.Table]) -> _Reduced:
    frame = _frame(tables)
    return _Reduced(_as_strings(aggregate_clients(frame)), _as_strings(count_scores(frame)))


def _frame(tables: Sequence[pa.Table]) -> pd.DataFrame:
    return pa.concat_tables(tables).unify_dictionaries().to_pandas()


def count_scores(metrics: pd.DataFrame) -> pd.DataFrame:
    """Return which scores there are: one row per trial, model, split, metric and round of the table `metrics`.

    Further columns are the number of `values`, the number of NaN values (`missing`), the number of values of clients
    (`clients`), and `cohort`: a hash of the set of clients that have values other than NaN; 0 if there is no client.
    """
    group = metrics.groupby(_COUNTED, sort=False, observed=True).ngroup().rename("group")
    is_client = metrics["client"] != SERVER
    missing = metrics["value"].isna()
    counted = pd.DataFrame({"values": 1, "missing": missing, "clients": is_client})
    of_group = counted.groupby(group).sum()

    scored = pd.DataFrame({"group": group, "client": metrics["client"]})
    scored = scored[is_client & ~missing].drop_duplicates()
    of_clients = pd.util.hash_array(scored["client"].to_numpy())
    hashes = pd.Series(of_clients, scored["group"], dtype="uint64")
    sums = hashes.groupby(level=0).sum()  # a sum does not depend on the order
    cohort = sums.reindex(of_group.index, fill_value=0)

    first = metrics.loc[~group.duplicated(), _COUNTED]
    return first.reset_index(drop=True).assign(**of_group, cohort=cohort)


def _as_strings(frame: pd.DataFrame) -> pd.DataFrame:
    """Return `frame` with strings in place of categories."""
    texts = {}
    for name, column in frame.select_dtypes("category").items():
        texts[name] = column.astype(column.cat.categories.dtype)
    return frame.assign(**texts)


class Tables:
    """The three tables as data frames, which unpack as `metrics`, `rounds` and `trials`.

    Reports read `curves`, `counts` and `scores`, because `metrics` may not fit in memory.

    Attributes:
        scores: The rows of `metrics`, an item per trial.
        rounds, trials: The other two tables.
        faults: The rows of `trials` that cannot be read and are left out: the experiment, and a line on each.
        places: The folders of the experiments, by their names in these tables.
    """

    def __init__(
        self,
        scores: Sequence[TrialScores],
        rounds: pd.DataFrame,
        trials: pd.DataFrame,
        places: Mapping[str, Storage],
        faults: Sequence[tuple[str, str]] = (),
    ):
        self.scores = scores
        self.rounds = rounds
        self.trials = trials
        self.faults = faults
        self.places = places

    def __iter__(self) -> Iterator[pd.DataFrame]:
        return iter((self.metrics, self.rounds, self.trials))

    def with_trials(self, trials: pd.DataFrame) -> "Tables":
        """Return the same scores and rounds, with other columns of the trials."""
        return Tables(self.scores, self.rounds, trials, self.places, self.faults)

    def by_data(self) -> "Tables":
        """Return the tables with an experiment of its own for all trials with the same data.

        `experiments_by_data` names these experiments.
        """
        names = experiments_by_data(self.trials)
        before = self.trials["experiment"]
        if names.equals(before):
            return self
        keys = zip(before, self.trials["trial"], strict=True)
        renamed = dict(zip(keys, names, strict=True))
        of_rounds = []
        for key in zip(self.rounds["experiment"], self.rounds["trial"], strict=True):
            of_rounds.append(renamed.get(key, key[0]))
        places = {}
        for name, own in zip(names, before, strict=True):
            places[name] = self.places[own]
        reduce_together(self.scores)
        renamed_scores = [scores.renamed(renamed) for scores in self.scores]
        return Tables(
            scores=renamed_scores,
            rounds=self.rounds.assign(experiment=of_rounds),
            trials=self.trials.assign(experiment=names),
            places=places,
            faults=self.faults,
        )

    @cached_property
    def metrics(self) -> pd.DataFrame:
        """The table `metrics`."""
        tables = [scores.rows() for scores in self.scores]
        return pa.concat_tables(tables).to_pandas()

    @cached_property
    def curves(self) -> pd.DataFrame:
        """The clients of each round aggregated; see `aggregate_clients`."""
        reduce_together(self.scores)
        curves = [scores.reduced.curves for scores in self.scores]
        return pd.concat(curves, ignore_index=True)

    @cached_property
    def counts(self) -> pd.DataFrame:
        """Which scores there are; see `count_scores`."""
        reduce_together(self.scores)
        counts = [scores.reduced.counts for scores in self.scores]
        return pd.concat(counts, ignore_index=True)

    @cached_property
    def groups(self) -> pd.DataFrame:
        """The trials with their groups; see `group_trials`."""
        return group_trials(self.trials)

    @cached_property
    def criteria(self) -> dict[str, str]:
        """The metric of each experiment that chooses rounds and hyperparameters; see `selection_metrics`."""
        return selection_metrics(self.trials, self.counts)

    @cached_property
    def splits(self) -> dict[str, Splits]:
        """Which examples the seeds of each experiment share."""
        counted, _ = self._countable
        return splits_by_experiment(self.trials, counted)

    @cached_property
    def done(self) -> pd.DataFrame:
        """The trials that count (`countable_trials`), and again those that a seed chose (`with_choices_by_seed`)."""
        counted, _ = self._countable
        return with_choices_by_seed(counted, self.curves, self.splits, self.criteria, self._own_points)

    @cached_property
    def notes(self) -> list[str]:
        """Sentences on trials that do not count, or cannot be read, or that validation cannot compare."""
        counted, notes = self._countable
        faults = []
        for _, line in self.faults:
            faults.append(f"Left out: {line}.")
        return [*faults, *notes, *seed_notes(counted), *by_seed_notes(self.done)]

    @cached_property
    def _countable(self) -> tuple[pd.DataFrame, list[str]]:
        return countable_trials(self.trials, self.groups, self.criteria)

    @cached_property
    def points_to_show(self) -> dict[tuple[str, int], str]:
        """The point to show by (experiment, order).

        It is the point at which the algorithm's paper evaluates (`default_eval_point` in `trials`), or else the first
        point. It may differ between hyperparameters: DBE without its bias is scored as a global model.
        """
        points = dict(self._own_points)
        by_seed = self.done[self.done["hyperparameters"] == BY_SEED]
        own_orders = self.groups[[*TRIAL, "order"]].rename(columns={"order": "own"})
        for row in by_seed.merge(own_orders, on=TRIAL).to_dict("records"):
            own = points[row["experiment"], row["own"]]
            points[row["experiment"], row["order"]] = own
        return points

    @cached_property
    def _own_points(self) -> dict[tuple[str, int], str]:
        in_order = self.groups.sort_values(["started", "trial"], kind="stable")
        groups = in_order[[*TRIAL, "order"]]
        of_participants = ~self.counts["unseen"]
        scored = self.counts.loc[of_participants, [*TRIAL, "point"]].drop_duplicates()
        present = scored.merge(groups, on=TRIAL)
        present = present.assign(place=present["point"].map(POINTS.index))
        present = present.sort_values("place", ascending=False)
        own = self.trials[[*TRIAL, "default_eval_point"]]
        declared = groups.merge(own, on=TRIAL).dropna()
        declared = declared.rename(columns={"default_eval_point": "point"})
        points: dict[tuple[str, int], str] = {}
        for row in [*present.to_dict("records"), *declared.to_dict("records")]:  # the last row of a group counts
            points[row["experiment"], row["order"]] = row["point"]
        return points


def selection_metrics(trials: pd.DataFrame, scores: pd.DataFrame) -> dict[str, str]:
    """Return the metric of each experiment that chooses rounds and hyperparameters, and that is shown by default.

    It is the `selection_metric` of the table `trials`. If trials differ in it or have none, it is accuracy, or loss if
    `scores` (columns experiment, split, point and metric) have no accuracy, because labels are no classes.
    """
    of_training = (scores["split"] == "train") & (scores["point"] == "trained")
    present = scores[~of_training].groupby("experiment")["metric"].agg(set)
    criteria = {}
    for experiment, of_experiment in trials.groupby("experiment"):
        named = sorted(set(of_experiment["selection_metric"].dropna()))
        usual = {"loss", "accuracy"} & present.get(experiment, set())
        criterion = "accuracy"
        if usual == {"loss"}:
            criterion = "loss"
        if len(named) == 1:
            criterion = named[0]
        criteria[str(experiment)] = criterion
    return criteria


def read(folder: str | Path, experiment: str | None = None, *, select: str | None = None) -> Tables:
    """Return the tables of `experiment`, or of every experiment in `folder`; tables without rows have all columns.

    In `trials`, the status of a trial that never ended and that no process runs is `lost`. Nothing is written.

    Args:
        folder: The folder of the results, a path or a URL.
        select: The metric that chooses rounds and hyperparameters, in place of the trials' own.

    Raises:
        UsageError: The folder has no results, or none of `experiment`, or no validation values of `select`, or results
            with another schema.
        StorageError: A file is damaged, or the disk or the object store fails.
    """
    scores: list[TrialScores] = []
    rounds: list[pd.DataFrame] = []
    rows: list[dict[str, Any]] = []
    faults: list[tuple[str, str]] = []
    with storage_errors(str(folder)):
        places = _homes(folder, experiment)
        for home in places.values():
            scores += _scores_of(home)
            rounds += _read_all(home, "rounds")
            readable, lines = readable_trials(home.child("trials"))
            rows += _with_lost(readable, home)
            faults += [(home.name, line) for line in lines.values()]
    all_rounds = pd.concat(rounds or [ROUNDS_SCHEMA.empty_table().to_pandas()], ignore_index=True)
    all_trials = _printable(trials_table(rows)).to_pandas()
    tables = Tables(scores or [TrialScores([])], all_rounds, all_trials, places, faults)
    if select is None:
        return tables
    is_validation = tables.counts["split"] == "val"
    known = sorted(tables.counts.loc[is_validation, "metric"].unique())
    if select not in known:
        has_metric = tables.counts["metric"] == select
        others = sorted(tables.counts.loc[has_metric, "split"].unique())
        found = ""
        if others:
            found = f", though {others[0]} data have it"
        near = suggestion(select, known)
        raise UsageError(f"select={select}: no such metric on validation data{found}; {near}")
    return tables.with_trials(tables.trials.assign(selection_metric=select))


def read_by_data(folder: str | Path, experiment: str | None = None, *, select: str | None = None) -> Tables:
    """Return what `read` returns, with an experiment for all trials with the same data (`Tables.by_data`).

    Args:
        folder: The folder of the results, a path or a URL.
        experiment: Also the name of an experiment with certain data, such as "skew (partition.alpha=0.1)".
        select: As for `read`.

    Raises:
        UsageError: As for `read`.
        StorageError: As for `read`.
    """
    name = _without_data(experiment)
    tables = read(folder, name, select=select).by_data()
    if experiment is None or experiment == name:
        return tables
    known = sorted(tables.places)
    if experiment not in known:
        near = suggestion(experiment, known)
        raise UsageError(f"experiment={experiment}: no such experiment in {folder}; {near}")
    return of_experiment(tables, experiment)


def _without_data(experiment: str | None) -> str | None:
    """Return the name of an experiment without the data that `experiments_by_data` adds to it."""
    if experiment is None or not experiment.endswith(")"):
        return experiment
    return experiment.partition(" (")[0]


def of_experiment(tables: Tables, name: str) -> Tables:
    """Return the rows of one experiment."""
    rounds = tables.rounds[tables.rounds["experiment"] == name].reset_index(drop=True)
    trials = tables.trials[tables.trials["experiment"] == name].reset_index(drop=True)
    scores = []
    for of_trial in tables.scores:
        if (of_trial.reduced.counts["experiment"] == name).any():
            scores.append(of_trial)
    faults = []
    for fault in tables.faults:
        if fault[0] in (name, _without_data(name)):
            faults.append(fault)
    return Tables(scores, rounds, trials, tables.places, faults)


def read_events(folder: str | Path, experiment: str | None = None) -> pd.DataFrame:
    """Return a row for each `Event` of the trials of `experiment`, or of every experiment in `folder`, sorted by time.

    Raises:
        UsageError: The folder has no results, or none of `experiment`.
    """
    frames = [EVENTS_SCHEMA.empty_table().to_pandas()]
    with storage_errors(str(folder)):
        for home in _homes(folder, _without_data(experiment)).values():
            frames += _read_all(home, "events")
    events = pd.concat(frames[1:] or frames, ignore_index=True)
    return events.sort_values("time", ignore_index=True, kind="stable")


def _homes(folder: str | Path, experiment: str | None) -> dict[str, Storage]:
    """Return the folders of the experiments by their names."""
    names = list_experiments(folder)
    if experiment is not None:
        if experiment not in names:
            near = suggestion(experiment, names)
            raise UsageError(f"experiment={experiment}: no such experiment in {folder}; {near}")
        names = [experiment]
    storage = open_storage(folder)
    return {name: storage.child(name) for name in names}


def list_experiments(folder: str | Path) -> list[str]:
    """Return the names of the experiments in `folder`, sorted.

    Raises:
        UsageError: There are none.
    """
    storage = open_storage(folder)
    try:
        names = [name for name in storage.folders() if _has_results(storage.child(name))]
        if names:
            return names
        found = storage.exists()
        is_experiment = _has_results(storage)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be read ({one_line(error)})") from error
    if is_experiment:
        if is_url(folder):
            place = str(folder)
        else:
            place = str(Path(folder).resolve())
        parent, _, name = place.rstrip("/").rpartition("/")
        raise UsageError(f"{folder}: this is a single experiment; give {parent} --experiment {name}")
    what = "no such folder of results"
    if found:
        what = "no results in it"
    raise UsageError(f"{folder}: {what}; give the folder that runs write to, as in results={folder}")


def _has_results(home: Storage) -> bool:
    return any(_files(home, table) for table in TABLES)


def _scores_of(home: Storage) -> list[TrialScores]:
    """Return the scores of each trial that has any; its files are named `<trial>-<number>.parquet`."""
    folder = home.child("metrics")
    contents: dict[str, list[bytes]] = {}
    for file in _files(home, "metrics"):
        trial = file.rpartition("-")[0]
        content, _ = read_checked(folder, file, schema=METRICS_SCHEMA)
        contents.setdefault(trial, []).append(content)
    return [TrialScores(files) for files in contents.values()]


def _read_all(home: Storage, name: str) -> list[pd.DataFrame]:
    """Return the table `name` of an experiment as one frame, or nothing if it has no files."""
    tables = []
    for file in _files(home, name):
        tables.append(read_parquet(home.child(name), file, schema=_SCHEMAS[name]))
    if not tables:
        return []
    return [_printable(pa.concat_tables(tables)).to_pandas()]


def _printable(table: pa.Table) -> pa.Table:
    """Return `table` with escapes in place of characters of names that do not show, such as a terminal's codes.

    Names may be somebody else's. A line end in one would end the comment of a table in LaTeX.
    """
    for place, field in enumerate(table.schema):
        is_category = pa.types.is_dictionary(field.type)
        if is_category:
            kind = field.type.value_type
        else:
            kind = field.type
        if not pa.types.is_string(kind) or field.name in _OF_SEVERAL_LINES:
            continue
        names = table.column(place).unique().cast(pa.string()).to_pylist()
        if all(name is None or name.isprintable() for name in names):
            continue
        escaped = []
        for name in table.column(place).cast(pa.string()).to_pylist():
            escaped.append(name and printable(name))
        column = pa.array(escaped, pa.string())
        if is_category:
            column = column.dictionary_encode()
        table = table.set_column(place, field.name, column)
    return table


def _files(home: Storage, name: str) -> list[str]:
    files = home.child(name).files()
    parquet = [file for file in files if file.endswith(".parquet")]
    return sorted(file for file in parquet if file[0] not in "._")


def _with_lost(rows: list[dict[str, Any]], home: Storage) -> list[dict[str, Any]]:
    """Return `rows` with the status `lost` for trials that run by the table, although their owner is dead."""
    alive: dict[str, bool] = {}
    checked = []
    for row in rows:
        owner = row["owner"]
        if row["status"] == "running" and owner:
            if owner not in alive:
                alive[owner] = is_alive(home, owner) is not False
            if not alive[owner]:
                row = row | {"status": "lost"}
        checked.append(row)
    return checked
