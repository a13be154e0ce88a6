"""Parquet files of results: the tables of a trial, which may be read at any moment, and the small files beside them.

The columns are the fields of `Score`, `Record` and `Event`. Rounds have the same numbers in all tables (see `Record`),
so a resumed trial drops exactly the rows that it repeats: those after the checkpoint's round. Every file has the number
of its schema; a version of rayfed with another schema refuses the file.
"""

import dataclasses
import datetime
import re
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rayfed.core.errors import StorageError, UsageError
from rayfed.core.paths import check_name
from rayfed.core.records import SECONDS, Event, MapPoint, Record, RepresentationMap, Score
from rayfed.records.storage import Storage, one_line, open_storage

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = 1
"""The number of the schema of results and checkpoints: what their columns and entries are, and what they mean."""
_KEY = b"rayfed.schema"
_ATTEMPTS = 3
_PARTITIONS = "partitions"
_HOLDINGS = pa.schema(
    [
        *(("client", pa.int32()), ("domain", pa.string()), ("split", pa.string())),
        *(("label", pa.int32()), ("count", pa.int64())),
    ]
)

Holding = tuple[int, str, str, int, int]
"""A client, its domain, a split, a class, and the number of its examples."""


def replace_parquet(table: pa.Table, folder: Storage, name: str) -> None:
    """Write `table` to a file, which at every moment has either the old rows or the new rows.

    Only one process may write a file. A crash may leave a hidden file, which the next call overwrites.
    """
    stream = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({_KEY: str(SCHEMA)}), stream, write_page_checksum=True)
    folder.write(name, memoryview(stream.getvalue()))


def read_parquet(folder: Storage, name: str) -> pa.Table:
    """Return the rows of one version of a file, also while another process replaces it.

    Raises:
        OSError: The file is missing or cannot be read.
        StorageError: The file is damaged.
        UsageError: The file has another schema than this version of rayfed.
    """
    return read_checked(folder, name)[1]


def read_checked(folder: Storage, name: str) -> tuple[bytes, pa.Table]:
    """Return the content of a file for `decompressed`, and its rows, with the errors of `read_parquet`."""
    for attempt in range(_ATTEMPTS):
        content = folder.read(name)
        try:
            table = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True).read()
        except Exception as error:  # pyarrow raises many kinds for damaged bytes
            # An object store may give the size of the old version and the bytes of the new one.
            if attempt == _ATTEMPTS - 1:
                raise StorageError(
                    f"{folder.location}/{name}: damaged, not the Parquet file that rayfed wrote "
                    f"({one_line(error)[:120]}); restore it, or delete it and run its trials again"
                ) from error
        else:
            number = (table.schema.metadata or {}).get(_KEY, b"none").decode()
            check_schema(number, f"{folder.location}/{name}")
            return content, table.replace_schema_metadata(None)
    raise AssertionError


def decompressed(content: bytes, categories: Sequence[str] = ()) -> pa.Table:
    """Return the rows of a file, with the columns `categories` as categories of distinct strings."""
    file = pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True, read_dictionary=list(categories))
    return file.read().replace_schema_metadata(None)


def check_schema(number: object, where: str) -> None:
    """Raise UsageError if the schema of results is not number `SCHEMA`."""
    if str(number) != str(SCHEMA):
        raise UsageError(
            f"{where}: has schema {number}, and this version of rayfed reads schema {SCHEMA}; give another folder, or "
            "use the version of rayfed that wrote it"
        )


def write_holdings(home: Storage, digest: str, holdings: Iterable[Holding]) -> None:
    """Write how many examples of each class a client holds to `partitions/<partition_hash>.parquet`, for plots.

    Trials with the same partition share the file, which is written once.
    """
    folder, name = home.child(_PARTITIONS), f"{digest}.parquet"
    if name in folder.files():
        return
    rows = [dict(zip(_HOLDINGS.names, holding, strict=True)) for holding in holdings]
    replace_parquet(pa.Table.from_pylist(rows, schema=_HOLDINGS), folder, name)


def read_holdings(home: Storage, digest: str) -> "pd.DataFrame | None":
    """Return the partition with the hash `digest`; None if it was not recorded."""
    try:
        return read_parquet(home.child(_PARTITIONS), f"{digest}.parquet").to_pandas()
    except FileNotFoundError:
        return None


def write_map(folder: Storage, trial: str, round: int, map: RepresentationMap) -> None:
    """Write a map of representations to `<trial>-round<r>-<metric>-<point>-<split>-<layer>.parquet` in `folder`.

    The columns are client (-1: a test set of the server), domain, label, x, y and point, with one row per example. The
    point in the file's name is "joint" for a map of several points.
    """
    import pandas as pd  # imported late: the process of the recorder rarely writes a map

    name = map.name.rpartition(":")[2]
    layer = map.layer.replace(".", "_")
    table = pd.DataFrame(map.points, columns=list(MapPoint._fields))
    folder.write(f"{trial}-round{round}-{name}-{map.point}-{map.split}-{layer}.parquet", table.to_parquet(index=False))


WRITING_SHARE = 0.02
"""The fraction of the elapsed time that writing may take before `flush` starts to skip."""
_ALL_ROUNDS = 2**31 - 1
_SEGMENT_ROWS = 200_000

_TRIAL_COLUMNS = [("experiment", pa.string()), ("trial", pa.string()), ("algorithm", pa.string()), ("seed", pa.int64())]
"""The columns that every row repeats, so that a table needs no other table."""
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
    "metrics": (METRICS_SCHEMA, lambda record: [{"round": record.round, **vars(score)} for score in record.scores]),
    "rounds": (ROUNDS_SCHEMA, _rounds_row),
}
"""The tables of rounds: the schema, and the function that makes the rows of a record."""


class TrialWriter:
    """Collects a trial's rows and writes them to the folders `metrics`, `rounds` and `events` of the experiment.

    Only one process may write a trial.

    Args:
        keep_through_round: The last round of an earlier attempt whose rows are kept; None: its rows are dropped.
        keep_events: Whether the events of an earlier attempt are kept although its rows are dropped. If
            `keep_through_round` is given, all events are kept, those of later rounds included.
        segment_rows: The rows of a Parquet file after which the next file begins.

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
        """Add a round with its scores, for the next `flush` that writes."""
        for name, (_, rows_of) in _TABLES.items():
            self._waiting[name] += [self._columns | row for row in rows_of(record)]

    def add_events(self, events: Iterable[Event]) -> None:
        """Write events to disk at once, because they are rare and explain why no rounds follow."""
        self._events.append(
            self._columns | vars(event) | {"time": datetime.datetime.fromtimestamp(event.time, datetime.UTC)}
            for event in events
        )

    def flush(self, *, force: bool = False) -> None:
        """Write the added rows to disk, unless writing has taken more than `WRITING_SHARE` of the time so far.

        Args:
            force: Write in any case, as before a checkpoint: a resumed trial keeps only the rounds on disk.

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

    New rows rewrite the last file. After `segment_rows` rows the next file begins, so that writing does not become
    slower in a long run. Rows never move between files, and files are never deleted, so a reader who has listed the
    folder finds every file, and no row twice.

    Rows of an earlier attempt are kept up to and including `keep_through_round` (None: none are kept).
    """

    def __init__(
        self, folder: Storage, trial: str, schema: pa.Schema, keep_through_round: int | None, segment_rows: int
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
        # The state changes last, so that the same rows can be appended again after a full disk.
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
