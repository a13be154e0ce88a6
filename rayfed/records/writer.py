"""Writes the rows of trials to the folders `metrics`, `rounds`, `predictions` and `events` of an experiment.

Every trial has files of its own, `<trial>-0000.parquet` and on. New rows are appended to the last file while it is
small, and else begin the next file. So rows never move between files and no file is deleted: a reader who has listed a
folder finds every file whole, and no row twice.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.paths import check_name
from rayfed.core.round_record import Event, Record
from rayfed.records.files import read_parquet, replace_parquet
from rayfed.records.round_report import RoundReport, values_of
from rayfed.records.storage import Storage, open_storage
from rayfed.records.tables import (
    EVENTS_SCHEMA,
    METRICS_SCHEMA,
    PREDICTIONS_SCHEMA,
    ROUNDS_SCHEMA,
    events_rows,
    in_memory,
    metrics_rows,
    no_scores,
    predictions_rows,
    record_of,
    rounds_rows,
    scores_by_round,
    string_columns,
)

WRITING_SHARE = 0.02
"""The fraction of the elapsed time that a recorder may take to write rows that no checkpoint waits for."""
SEGMENT_ROWS = 50_000
"""The rows of a file after which the next file begins: few enough to be written again with every few rounds."""
_LONG_ROWS = 200
"""The same for rows that hold a number for each example."""
_ALL_ROUNDS = 2**31 - 1
_FILE = re.compile(r"(.+)-(\d{4,})\.parquet")


class WritingBudget:
    """The share of the time that writing may take, for all trials of a recorder together."""

    def __init__(self, share: float = WRITING_SHARE, clock: Callable[[], float] = time.monotonic):
        self._share = share
        self._clock = clock
        self._began = clock()
        self._spent = 0.0

    @property
    def is_spent(self) -> bool:
        """Whether writing has taken more than its share of the time so far."""
        elapsed = self._clock() - self._began
        return self._spent > self._share * elapsed

    @contextmanager
    def spending(self) -> Iterator[None]:
        """Count the time within."""
        began = self._clock()
        try:
            yield
        finally:
            self._spent += self._clock() - began


class TableFiles:
    """A table of an experiment: a folder with the files of all trials.

    The folder is listed once, when the first trial begins: no other process writes the trials of this one meanwhile.

    Args:
        home: The folder of the experiment.
        segment_rows: The rows of a file after which the next file begins.
    """

    def __init__(self, home: Storage, name: str, schema: pa.Schema, segment_rows: int = SEGMENT_ROWS):
        self.schema = schema
        self._segment_rows = segment_rows
        self._folder = home.child(name)
        self._numbers: dict[str, list[int]] | None = None  # of the files, by trial
        self._strings = string_columns(schema)

    def append(self, trial: str, rows: pa.Table) -> None:
        """Write further rows of a trial; a crash leaves all of them or none."""
        if not rows.num_rows:
            return
        numbers = self._numbers_of(trial)
        number = max(numbers, default=0)
        if number in numbers:
            before = read_parquet(self._folder, _file(trial, number), self._strings)
            if before.num_rows + rows.num_rows <= self._segment_rows or not before.num_rows:
                rows = pa.concat_tables([before, rows])
            else:
                number += 1
        self._write(trial, number, rows)
        if number not in numbers:  # noted last, so that the same rows can be appended again after a full disk
            numbers.append(number)

    def rows_of(self, trial: str, first: int, last: int) -> pa.Table:
        """Return the rows of a trial from round `first` through round `last`."""
        tables = [in_memory(self.schema).empty_table()]
        for number in list(self._numbers_of(trial)):
            tables.append(read_parquet(self._folder, _file(trial, number), self._strings))
        rows = pa.concat_tables(tables)
        is_wanted = pc.and_(pc.greater_equal(rows["round"], first), pc.less_equal(rows["round"], last))
        return rows.filter(is_wanted)

    def keep_through(self, trial: str, round: int | None) -> None:
        """Drop the rows of a trial after `round`; None: all of its rows.

        Doing this twice does no harm, so a crash between two files needs no special care.

        Raises:
            StorageError: A file is damaged.
            UsageError: A file has another schema than this version of rayfed.
        """
        for number in self._numbers_of(trial):
            rows = read_parquet(self._folder, _file(trial, number), self._strings)
            kept = rows.slice(0, 0)
            if round is not None:
                kept = rows.filter(pc.less_equal(rows["round"], round))
            if kept.num_rows < rows.num_rows:
                self._write(trial, number, kept)

    def _numbers_of(self, trial: str) -> list[int]:
        if self._numbers is None:
            self._numbers = {}
            for name in sorted(self._folder.files()):
                match = _FILE.fullmatch(name)
                if match:
                    self._numbers.setdefault(match[1], []).append(int(match[2]))
        return self._numbers.setdefault(trial, [])

    def _write(self, trial: str, number: int, rows: pa.Table) -> None:
        replace_parquet(rows.cast(self.schema), self._folder, _file(trial, number))


def _file(trial: str, number: int) -> str:
    return f"{trial}-{number:04d}.parquet"


class ExperimentFiles:
    """The tables of an experiment to which trials append rows.

    Args:
        segment_rows: The rows of a file after which the next file begins.
    """

    def __init__(self, folder: str | Path, experiment: str, *, segment_rows: int = SEGMENT_ROWS):
        check_name(experiment, "experiment")
        home = open_storage(folder).child(experiment)
        self.experiment = experiment
        self.metrics = TableFiles(home, "metrics", METRICS_SCHEMA, segment_rows)
        self.rounds = TableFiles(home, "rounds", ROUNDS_SCHEMA, segment_rows)
        self.predictions = TableFiles(home, "predictions", PREDICTIONS_SCHEMA, min(segment_rows, _LONG_ROWS))
        self.events = TableFiles(home, "events", EVENTS_SCHEMA, segment_rows)

    def values(self, trial: str, first: int, last: int) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the rounds `first` to `last` of a trial with their values, see `RoundReport`, from the tables."""
        scores = dict(scores_by_round(self.metrics.rows_of(trial, first, last)))
        for row in self.rounds.rows_of(trial, first, last).to_pylist():
            record = record_of(row)
            yield record.round, values_of(record, scores.get(record.round) or no_scores())


class TrialWriter:
    """Collects a trial's rows and appends them to its files.

    Only one process may write a trial.

    Args:
        keep_through_round: The last round of an earlier attempt whose rows are kept; None: its rows are dropped.
        keep_events: Whether the events of an earlier attempt are kept although its rows are dropped. If
            `keep_through_round` is given, all events are kept, those of later rounds included.

    Raises:
        UsageError: The name of the trial cannot be the name of a file.
    """

    def __init__(
        self,
        files: ExperimentFiles,
        trial: str,
        algorithm: str,
        seed: int,
        *,
        keep_through_round: int | None = None,
        keep_events: bool = False,
    ):
        check_name(trial, "trial")
        self._files = files
        self._trial = trial
        self._of_trial: Mapping[str, Any] = {
            "experiment": files.experiment,
            "trial": trial,
            "algorithm": algorithm,
            "seed": seed,
        }
        self._scores: list[tuple[int, bytes]] = []  # that wait: rounds with the columns of their scores
        self._records: list[Record] = []  # the same rounds without scores
        self.waiting_bytes = 0
        files.metrics.keep_through(trial, keep_through_round)
        files.rounds.keep_through(trial, keep_through_round)
        files.predictions.keep_through(trial, keep_through_round)
        keeps_all = keep_events or keep_through_round is not None
        last_round = None
        if keeps_all:
            last_round = _ALL_ROUNDS
        files.events.keep_through(trial, last_round)

    def add(self, report: RoundReport) -> None:
        """Add a round, which waits for the next `flush`."""
        self._scores.append((report.record.round, report.packed))
        self._records.append(report.record)
        self.waiting_bytes += report.nbytes

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once, because they are rare and explain why no rounds follow."""
        self._files.events.append(self._trial, events_rows(events, self._of_trial))

    def flush(self) -> None:
        """Write the rounds that wait to disk.

        Raises:
            OSError: The disk is full or gone; the rounds wait for the next call.
        """
        scores = metrics_rows(self._scores, self._of_trial)
        self._files.metrics.append(self._trial, scores)  # first, so that a round in `rounds` has its scores there
        self._scores = []
        predictions = predictions_rows(self._records, self._of_trial)
        self._files.predictions.append(self._trial, predictions)
        self._records = [replace(record, predictions=[]) for record in self._records]
        records = rounds_rows(self._records, self._of_trial)
        self._files.rounds.append(self._trial, records)
        self._records = []
        self.waiting_bytes = 0
