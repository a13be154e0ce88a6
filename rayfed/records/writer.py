"""The columns of the tables `metrics`, `rounds` and `events`, and writing a trial's rows for readers at any moment.

The columns follow from `Score`, `Record` and `Event`. Rounds have the same numbers in all tables (see `Record`). A
resumed trial can therefore drop exactly the rows that it is going to repeat: those after the checkpoint's round.
"""

import dataclasses
import datetime
import re
import time
import typing
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.paths import check_name
from rayfed.core.records import SECONDS, Event, Record, Score
from rayfed.records.files import read_parquet, replace_parquet
from rayfed.records.storage import Storage, open_storage

WRITING_SHARE = 0.02
"""The fraction of the elapsed time that writing may take before `flush` starts to skip."""
_ALL_ROUNDS = 2**31 - 1
_SEGMENT_ROWS = 200_000

_TRIAL_COLUMNS = [("experiment", pa.string()), ("trial", pa.string()), ("algorithm", pa.string()), ("seed", pa.int64())]
"""The columns that every row of a trial repeats, so that a table makes sense alone."""
_ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_BYTES_BY_FIELD = pa.map_(pa.string(), pa.int64())  # pandas reads a list of (field, bytes) pairs


def _columns(kind: type[Score] | type[Event]) -> list[tuple[str, pa.DataType]]:
    hints = typing.get_type_hints(kind)
    return [
        (f.name, pa.type_for_alias(f.metadata["arrow"]) if f.metadata else _ARROW_TYPES[hints[f.name]])
        for f in dataclasses.fields(kind)
    ]


METRICS_SCHEMA = pa.schema([*_TRIAL_COLUMNS, ("round", pa.int32()), *_columns(Score)])
ROUNDS_SCHEMA = pa.schema(
    [
        *_TRIAL_COLUMNS,
        *(("round", pa.int32()), ("stage", pa.string())),
        *((f"seconds_{part}", pa.float64()) for part in SECONDS),
        *(("bytes_down", pa.int64()), ("bytes_up", pa.int64())),
        *(("bytes_down_by_field", _BYTES_BY_FIELD), ("bytes_up_by_field", _BYTES_BY_FIELD)),
        *(("bytes_to_hosts", pa.int64()), ("bytes_from_hosts", pa.int64()), ("bytes_formula", pa.float64())),
        *(("cohort", pa.int32()), ("sampled", pa.int32()), ("simulated_seconds", pa.float64())),
        *(("clock_seconds", pa.float64()), ("staleness_mean", pa.float64())),
        *(("staleness_max", pa.int32()), ("waiting", pa.int32())),
        *(("epsilon", pa.float64()), ("privacy_unit", pa.string())),
        *(("busy_seconds", pa.list_(pa.float64())), ("predicted_seconds", pa.list_(pa.float64()))),
        *(("balance", pa.float64()), ("gpu_bytes", pa.int64())),
    ]
)
EVENTS_SCHEMA = pa.schema([*_TRIAL_COLUMNS, ("time", pa.timestamp("us", tz="UTC")), *_columns(Event)[1:]])


def _metrics_rows(record: Record) -> list[dict[str, Any]]:
    return [{"round": record.round, **vars(score)} for score in record.scores]


def _rounds_row(record: Record) -> list[dict[str, Any]]:
    other = {
        **{f"seconds_{part}": record.seconds[part] for part in SECONDS},
        "bytes_down": sum(record.bytes_down.values()),
        "bytes_up": sum(record.bytes_up.values()),
        "bytes_down_by_field": list(record.bytes_down.items()),
        "bytes_up_by_field": list(record.bytes_up.items()),
        "sampled": record.cohort if record.sampled is None else record.sampled,
        "busy_seconds": record.busy,
        "predicted_seconds": record.predicted,
    }
    return [{name: other[name] if name in other else getattr(record, name) for name in ROUNDS_SCHEMA.names[4:]}]


_TABLES: Mapping[str, tuple[pa.Schema, Callable[[Record], list[dict[str, Any]]]]] = {
    "metrics": (METRICS_SCHEMA, _metrics_rows),
    "rounds": (ROUNDS_SCHEMA, _rounds_row),
}
"""The tables of rounds: the schema, and the function that makes the rows of a record."""


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
            name: _Segments(home.child(name), trial, schema, keep_through_round, segment_rows)
            for name, (schema, _) in _TABLES.items()
        }
        keep = _ALL_ROUNDS if keep_events or keep_through_round is not None else None
        self._events = _Segments(home.child("events"), trial, EVENTS_SCHEMA, keep, segment_rows)
        self._waiting: dict[str, list[dict[str, Any]]] = {name: [] for name in _TABLES}
        self._began = time.monotonic()
        self._spent = 0.0

    def add(self, record: Record) -> None:
        """Add a round with its scores; it is on disk after the next `flush` that does not skip."""
        for name, (_, rows_of) in _TABLES.items():
            self._waiting[name] += [self._columns | row for row in rows_of(record)]

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once: they are rare, and explain why rounds do not follow."""
        self._events.append(
            self._columns | vars(event) | {"time": datetime.datetime.fromtimestamp(event.time, datetime.UTC)}
            for event in events
        )

    def flush(self, *, force: bool = False) -> None:
        """Write the added rows to disk, unless writing has taken more than `WRITING_SHARE` of the time so far.

        Args:
            force: Write in any case. A checkpoint needs this, since a resumed trial keeps only the rounds on disk.

        Raises:
            OSError: The disk is full or gone; the rows stay in memory for the next call.
        """
        began = time.monotonic()
        if not force and self._spent > WRITING_SHARE * (began - self._began):
            return
        for name, rows in self._waiting.items():  # metrics first, so that a round in `rounds` has its scores there
            self._segments[name].append(rows)
            self._waiting[name] = []
        self._spent += time.monotonic() - began


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
        keep_through_round: int | None,
        segment_rows: int,
    ):
        self._folder, self._trial, self._segment_rows = folder, trial, segment_rows
        self._index, self._current = 0, schema.empty_table()
        file = re.compile(re.escape(trial) + r"-(\d{4,})\.parquet")
        matches = (file.fullmatch(name) for name in folder.files())
        for self._index, name in sorted((int(match[1]), match[0]) for match in matches if match):
            self._current = self._trimmed(name, keep_through_round)

    def append(self, new: Iterable[Mapping[str, Any]]) -> None:
        """Write rows to disk; a crash leaves all of them or none."""
        rows = pa.Table.from_pylist(list(new), schema=self._current.schema)
        if not rows.num_rows:
            return
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
