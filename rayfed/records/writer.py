"""Writing one trial's rows of `metrics`, `rounds` and `events` while it runs, for readers at any moment."""

import re
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.paths import check_name
from rayfed.core.records import Event, Record
from rayfed.records.files import read_parquet, replace_parquet
from rayfed.records.schema import EVENTS_SCHEMA, TABLES, events_table
from rayfed.records.storage import Storage, open_storage

WRITING_SHARE = 0.02
"""The fraction of the elapsed time that writing may take before `flush` starts to skip."""
_ALL_ROUNDS = 2**31 - 1
_SEGMENT_ROWS = 200_000


class TrialWriter:
    """Collects a trial's rows and writes them to the folders `metrics`, `rounds` and `events` of the experiment.

    Only one process may write a trial.

    Args:
        keep_through_round: The last round whose rows of an earlier attempt are kept; None drops all rows.
        keep_events: Whether to keep the events of an earlier attempt although all of its other rows are dropped. All
            events are kept if `keep_through_round` is given, also those of later rounds.
        segment_rows: The number of rows of a Parquet file after which the next file begins.

    Raises:
        UsageError: The name of the experiment or the trial cannot be the name of a file.
    """

    def __init__(
        self,
        folder: str | Path,
        experiment: str,
        trial: str,
        algorithm: str,
        seed: int,
        *,
        keep_through_round: int | None = None,
        keep_events: bool = False,
        segment_rows: int = _SEGMENT_ROWS,
    ):
        check_name(experiment, "experiment")
        check_name(trial, "trial")
        self._columns = {"experiment": experiment, "trial": trial, "algorithm": algorithm, "seed": seed}
        home = open_storage(folder).child(experiment)
        self._segments = {
            name: _Segments(
                home.child(name), trial, table.schema, keep_through_round=keep_through_round, segment_rows=segment_rows
            )
            for name, table in TABLES.items()
        }
        keep = _ALL_ROUNDS if keep_events or keep_through_round is not None else None
        self._events = _Segments(home.child("events"), trial, EVENTS_SCHEMA, keep_through_round=keep)
        self._waiting: dict[str, list[Record]] = {name: [] for name in TABLES}
        self._began = time.monotonic()
        self._spent = 0.0

    def add(self, record: Record) -> None:
        """Add a round with its scores; it is on disk after the next `flush` that does not skip."""
        for waiting in self._waiting.values():
            waiting.append(record)

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once: they are rare, and explain why rounds do not follow."""
        if events := list(events):
            self._events.append(events_table(self._columns, events))

    def flush(self, *, force: bool = False) -> None:
        """Write the added rows to disk, unless writing has taken more than `WRITING_SHARE` of the time so far.

        Args:
            force: Write in any case. A checkpoint needs this, since a resumed trial keeps only the rounds on disk.

        Raises:
            ValueError: A row has an unknown split or point.
            OSError: The disk is full or gone; the rows stay in memory for the next call.
        """
        began = time.monotonic()
        if not force and self._spent > WRITING_SHARE * (began - self._began):
            return
        for name, records in self._waiting.items():  # metrics first, so that a round in `rounds` has its scores there
            if records and (rows := TABLES[name].rows(self._columns, records)).num_rows:
                self._segments[name].append(rows)
            self._waiting[name] = []
        self._spent += time.monotonic() - began

    def close(self) -> None:
        """Write everything to disk. The writer can still be used, and closed again."""
        self.flush(force=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class _Segments:
    """The Parquet files of one trial in one table, to which rows are appended: `<trial>-0000.parquet` and on.

    New rows rewrite the last file; past `segment_rows` a new file begins, so that writing does not become slower in a
    long run. A row never moves from one file to another, and no file is ever deleted. A reader who has just listed the
    folder therefore finds every file, and no row in two of them.

    Rows of an earlier attempt are kept up to and including `keep_through_round` (None: none are kept).
    """

    def __init__(
        self,
        folder: Storage,
        trial: str,
        schema: pa.Schema,
        *,
        keep_through_round: int | None,
        segment_rows: int = _SEGMENT_ROWS,
    ):
        self._folder = folder
        self._trial = trial
        self._segment_rows = segment_rows
        self._index = 0
        self._current = schema.empty_table()
        for index, name in _existing(folder, trial):
            self._index = index
            self._current = self._trimmed(name, keep_through_round)

    def append(self, rows: pa.Table) -> None:
        """Write `rows` to disk; a crash leaves all of them or none."""
        full = self._current.num_rows >= self._segment_rows
        index = self._index + 1 if full else self._index
        table = rows if full else pa.concat_tables([self._current, rows])
        replace_parquet(table, self._folder, f"{self._trial}-{index:04d}.parquet")
        # The state changes last, so that the same rows can be given again after a full disk.
        self._index, self._current = index, table

    def _trimmed(self, name: str, keep_through_round: int | None) -> pa.Table:
        # Trimming twice does no harm, so a crash between two files needs no special care.
        table = read_parquet(self._folder, name)
        if keep_through_round is None:
            kept = table.slice(0, 0)
        else:
            kept = table.filter(pc.less_equal(table["round"], keep_through_round))
        if kept.num_rows < table.num_rows:
            replace_parquet(kept, self._folder, name)
        return kept


def _existing(folder: Storage, trial: str) -> list[tuple[int, str]]:
    name = re.compile(re.escape(trial) + r"-(\d{4,})\.parquet")
    matches = (name.fullmatch(file) for file in folder.files())
    return sorted((int(match[1]), match[0]) for match in matches if match)
