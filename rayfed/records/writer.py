"""Writing one trial's rows of `metrics`, `rounds` and `events` while it runs, for readers at any moment."""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from rayfed.core.file_names import check_name
from rayfed.core.records import Event, Record, Score
from rayfed.records.schema import (
    EVENTS_SCHEMA,
    METRICS_SCHEMA,
    ROUNDS_SCHEMA,
    TrialId,
    events_table,
    metrics_table,
    rounds_table,
)
from rayfed.records.segments import SEGMENT_ROWS, Segments
from rayfed.records.storage import open_storage

WRITING_SHARE = 0.02
"""The fraction of the elapsed time that writing may take before `flush` starts to skip."""
_ALL_ROUNDS = 2**31 - 1
_SCHEMAS = {"metrics": METRICS_SCHEMA, "rounds": ROUNDS_SCHEMA}


class TrialWriter:
    """Collects a trial's rows and writes them to the folders `metrics`, `rounds` and `events` of the experiment.

    Only one process may write a trial.

    Args:
        keep_through_round: rows of an earlier attempt are kept up to and including this round; None drops them all.
        keep_events: whether to keep the events of an earlier attempt although all of its other rows are dropped.
            They are kept in any case if `keep_through_round` is given, also those of later rounds.
        segment_rows: rows of a Parquet file before the next one begins.

    Attributes:
        last_round: the last round that was kept in `rounds`, or None. If it is less than `keep_through_round`, rows
            were lost before the checkpoint.
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
        self._id = TrialId(check_name(experiment, "experiment"), check_name(trial, "trial"), algorithm, seed)
        self._home = home = open_storage(folder).child(experiment)
        self._segments = {
            name: Segments(
                home.child(name), trial, schema, keep_through_round=keep_through_round, segment_rows=segment_rows
            )
            for name, schema in _SCHEMAS.items()
        }
        keep = _ALL_ROUNDS if keep_events or keep_through_round is not None else None
        self._events = Segments(home.child("events"), trial, EVENTS_SCHEMA, keep_through_round=keep)
        self.last_round = self.written_round = self._segments["rounds"].last_round
        self._scores: list[tuple[int, Score]] = []
        self._rounds: list[Record] = []
        self._began = time.monotonic()
        self._spent = 0.0

    def add_scores(self, round: int, scores: Iterable[Score]) -> None:
        """Add scores of a round; they are on disk after the next `flush` that does not skip."""
        self._scores.extend((round, score) for score in scores)

    def add_round(self, record: Record) -> None:
        """Add the row of one round, without its scores; it is on disk after the next `flush` that does not skip."""
        self._rounds.append(record)

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once; they are rare, and say why what should follow does not."""
        if events := list(events):
            self._events.append(events_table(self._id, events))

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
        if self._scores:  # before the rounds, so that a round in `rounds` has its scores in `metrics`
            self._segments["metrics"].append(metrics_table(self._id, self._scores))
            self._scores = []
        if self._rounds:
            self._segments["rounds"].append(rounds_table(self._id, self._rounds))
            self.written_round = self._rounds[-1].round
            self._rounds = []
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
