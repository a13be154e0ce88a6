"""Writing one trial's rows of `metrics`, `rounds` and `events` while it runs, for readers at any moment."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rayfed.core.file_names import check_name
from rayfed.core.records import Event, Record
from rayfed.records.schema import EVENTS_SCHEMA, TABLES, events_table
from rayfed.records.segments import SEGMENT_ROWS, Segments
from rayfed.records.storage import open_storage

WRITING_SHARE = 0.02
"""The fraction of the elapsed time that writing may take before `flush` starts to skip."""
_ALL_ROUNDS = 2**31 - 1


class TrialWriter:
    """Collects a trial's rows and writes them to the folders `metrics`, `rounds` and `events` of the experiment.

    Only one process may write a trial.

    Args:
        keep_through_round: rows of an earlier attempt are kept up to and including this round; None drops them all.
        keep_events: whether to keep the events of an earlier attempt although all of its other rows are dropped.
            They are kept in any case if `keep_through_round` is given, also those of later rounds.
        segment_rows: rows of a Parquet file before the next one begins.

    Attributes:
        written_round: the last round that is on disk, or None.

    Raises:
        UsageError: a name of the experiment or the trial that cannot be the name of a file.
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
        segment_rows: int = SEGMENT_ROWS,
    ):
        check_name(experiment, "experiment")
        check_name(trial, "trial")
        self._columns = {"experiment": experiment, "trial": trial, "algorithm": algorithm, "seed": seed}
        home = open_storage(folder).child(experiment)
        self._segments = {
            name: Segments(
                home.child(name), trial, table.schema, keep_through_round=keep_through_round, segment_rows=segment_rows
            )
            for name, table in TABLES.items()
        }
        keep = _ALL_ROUNDS if keep_events or keep_through_round is not None else None
        self._events = Segments(home.child("events"), trial, EVENTS_SCHEMA, keep_through_round=keep)
        self.written_round = self._segments["rounds"].last_round
        self._waiting: dict[str, list[Record]] = {name: [] for name in TABLES}
        self._began = time.monotonic()
        self._spent = 0.0

    def add(self, record: Record) -> None:
        """Add a round with its scores and events; it is on disk after the next `flush` that does not skip."""
        for waiting in self._waiting.values():
            waiting.append(record)
        if record.events:
            self.add_events(record.events)

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once; they are rare, and say why what should follow does not."""
        if events := list(events):
            self._events.append(events_table(self._columns, events))

    def flush(self, *, force: bool = False) -> None:
        """Write what was added to disk, unless writing has taken more than `WRITING_SHARE` of the time so far.

        Args:
            force: write in any case. This is needed before a checkpoint, since a resumed trial keeps only the rounds
                that are on disk.

        Raises:
            ValueError: a row with an unknown split, point or stage.
            OSError: the disk is full or gone; the rows stay in memory for the next call.
        """
        began = time.monotonic()
        if not force and self._spent > WRITING_SHARE * (began - self._began):
            return
        for name, records in self._waiting.items():  # metrics first, so that a round in `rounds` has its scores there
            if records:
                rows = TABLES[name].rows(self._columns, records)
                if rows.num_rows:
                    self._segments[name].append(rows)
                self._waiting[name] = []
                self.written_round = records[-1].round
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
