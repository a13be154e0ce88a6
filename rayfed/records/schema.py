"""The columns of the tables `metrics`, `rounds` and `events`, derived from `Score`, `Record` and `Event`.

Rounds have the same numbers in all tables (see `Record`). A resumed trial can therefore drop exactly the rows that it
is going to repeat: those after the checkpoint's round.
"""

import dataclasses
import datetime
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from rayfed.core.records import EVENTS, POINTS, SECONDS, SPLITS, Event, Record, Score

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


def _seconds(part: str) -> Callable[[Record], float]:
    return lambda record: record.seconds[part]


_ROUND_COLUMNS: dict[str, tuple[pa.DataType, Callable[[Record], Any]]] = {
    "round": (pa.int32(), lambda record: record.round),
    "stage": (pa.string(), lambda record: record.stage),
    **{f"seconds_{part}": (pa.float64(), _seconds(part)) for part in SECONDS},
    "bytes_down": (pa.int64(), lambda record: sum(record.bytes_down.values())),
    "bytes_up": (pa.int64(), lambda record: sum(record.bytes_up.values())),
    "bytes_down_by_field": (_BYTES_BY_FIELD, lambda record: list(record.bytes_down.items())),
    "bytes_up_by_field": (_BYTES_BY_FIELD, lambda record: list(record.bytes_up.items())),
    "bytes_to_hosts": (pa.int64(), lambda record: record.bytes_to_hosts),
    "bytes_from_hosts": (pa.int64(), lambda record: record.bytes_from_hosts),
    "bytes_formula": (pa.float64(), lambda record: record.bytes_formula),
    "cohort": (pa.int32(), lambda record: record.cohort),
    "sampled": (pa.int32(), lambda record: record.cohort if record.sampled is None else record.sampled),
    "simulated_seconds": (pa.float64(), lambda record: record.simulated_seconds),
    "epsilon": (pa.float64(), lambda record: record.epsilon),
    "privacy_unit": (pa.string(), lambda record: record.privacy_unit),
    "busy_seconds": (pa.list_(pa.float64()), lambda record: record.busy),
    "predicted_seconds": (pa.list_(pa.float64()), lambda record: record.predicted),
    "balance": (pa.float64(), lambda record: record.balance),
    "gpu_bytes": (pa.int64(), lambda record: record.gpu_bytes),
}

METRICS_SCHEMA = pa.schema([*_TRIAL_COLUMNS, ("round", pa.int32()), *_columns(Score)])
ROUNDS_SCHEMA = pa.schema([*_TRIAL_COLUMNS, *((name, kind) for name, (kind, _) in _ROUND_COLUMNS.items())])
_TIME = pa.timestamp("us", tz="UTC")
EVENTS_SCHEMA = pa.schema([*_TRIAL_COLUMNS, ("time", _TIME), *_columns(Event)[1:]])


def _metrics_table(trial: Mapping[str, Any], records: Sequence[Record]) -> pa.Table:
    """Return the scores of `records` as rows of the table `metrics`; ValueError if no reader knows a split or point."""
    scores = [score for record in records for score in record.scores]
    _check_known({score.split for score in scores}, SPLITS, "split")
    _check_known({score.point for score in scores}, POINTS, "point")
    columns = {f.name: [getattr(score, f.name) for score in scores] for f in dataclasses.fields(Score)}
    rounds = [record.round for record in records for _ in record.scores]
    return _table(METRICS_SCHEMA, trial, {"round": rounds, **columns})


def _rounds_table(trial: Mapping[str, Any], records: Sequence[Record]) -> pa.Table:
    """Return `records` as rows of the table `rounds`."""
    columns = {name: [value(record) for record in records] for name, (_, value) in _ROUND_COLUMNS.items()}
    return _table(ROUNDS_SCHEMA, trial, columns)


def events_table(trial: Mapping[str, Any], events: Sequence[Event]) -> pa.Table:
    """Return `events` as rows of the table `events`; `trial` has the columns that all rows of a trial repeat."""
    _check_known({event.event for event in events}, EVENTS, "event")
    columns = {f.name: [getattr(event, f.name) for event in events] for f in dataclasses.fields(Event)}
    columns["time"] = [datetime.datetime.fromtimestamp(time, datetime.UTC) for time in columns["time"]]
    return _table(EVENTS_SCHEMA, trial, columns)


class _Table(NamedTuple):
    """A table of rounds: its schema, and the function that makes its rows of a trial's columns and records."""

    schema: pa.Schema
    rows: Callable[[Mapping[str, Any], Sequence[Record]], pa.Table]


TABLES = {"metrics": _Table(METRICS_SCHEMA, _metrics_table), "rounds": _Table(ROUNDS_SCHEMA, _rounds_table)}


def _table(schema: pa.Schema, trial: Mapping[str, Any], columns: dict[str, list[Any]]) -> pa.Table:
    length = len(columns["round"])
    constant = {name: [value] * length for name, value in trial.items()}
    return pa.table({**constant, **columns}, schema=schema)


def _check_known(names: set[str], known: tuple[str, ...], what: str) -> None:
    if unknown := names - set(known):
        raise ValueError(f"{what} {min(unknown)!r}: known are {', '.join(known)}")
