"""The columns of the tables `metrics`, `rounds`, `predictions` and `events`, and rows as columns of Arrow.

The columns are the fields of `Score`, `Record` and `Event`. Rounds have the same numbers in all tables (see `Record`),
so a resumed trial drops exactly the rows that it repeats: those after the checkpoint's round.

In memory, columns of strings are dictionaries: each distinct string once, and its number in every row. Files have plain
strings, which Parquet encodes in the same way.
"""

import dataclasses
import datetime
import functools
import itertools
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rayfed.core.errors import shown
from rayfed.core.round_record import POINTS, SECONDS, SPLITS, STAGES, Event, Record, Score

_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_ARROW_TYPES = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
_BYTES_BY_FIELD = pa.map_(pa.string(), pa.int64())  # pandas reads a list of (field, bytes) pairs


def _columns(kind: type[Score] | type[Event]) -> list[tuple[str, pa.DataType]]:
    hints = typing.get_type_hints(kind)
    columns = []
    for field in dataclasses.fields(kind):
        arrow = _ARROW_TYPES[hints[field.name]]
        if field.metadata:
            arrow = pa.type_for_alias(field.metadata["arrow"])
        columns.append((field.name, arrow))
    return columns


TRIAL_COLUMNS = [("experiment", pa.string()), ("trial", pa.string()), ("algorithm", pa.string()), ("seed", pa.int64())]
"""The columns that every row repeats, so that a table needs no other table."""
METRICS_SCHEMA = pa.schema([*TRIAL_COLUMNS, ("round", pa.int32()), *_columns(Score)])
ROUNDS_SCHEMA = pa.schema(
    [
        *TRIAL_COLUMNS,
        *(("round", pa.int32()), ("stage", pa.string())),
        *((f"seconds_{part}", pa.float64()) for part in SECONDS),
        *(("bytes_down", pa.int64()), ("bytes_up", pa.int64())),
        *(("bytes_down_by_field", _BYTES_BY_FIELD), ("bytes_up_by_field", _BYTES_BY_FIELD)),
        *(("bytes_to_hosts", pa.int64()), ("bytes_from_hosts", pa.int64()), ("bytes_formula", pa.float64())),
        *(("cohort", pa.int32()), ("sampled", pa.int32()), ("simulated_seconds", pa.float64())),
        *(("clock_seconds", pa.float64()), ("staleness_mean", pa.float64())),
        *(("staleness_max", pa.int32()), ("waiting", pa.int32())),
        *(("epsilon", pa.float64()), ("privacy_unit", pa.string()), ("delta", pa.float64())),
        *(("accountant", pa.string()), ("neighbours", pa.string())),
        *(("busy_seconds", pa.list_(pa.float64())), ("predicted_seconds", pa.list_(pa.float64()))),
        *(("balance", pa.float64()), ("gpu_bytes", pa.int64())),
    ]
)
PREDICTIONS_SCHEMA = pa.schema(
    [
        *TRIAL_COLUMNS,
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("point", pa.string()),
        ("kind", pa.string()),
        ("n", pa.int64()),
        ("outputs", pa.list_(pa.float32())),
        ("labels", pa.list_(pa.float32())),
    ]
)
EVENTS_SCHEMA = pa.schema([*TRIAL_COLUMNS, ("time", pa.timestamp("us", tz="UTC")), *_columns(Event)[1:]])


_ALLOWED: Mapping[str, Sequence[str]] = {"point": POINTS, "split": SPLITS, "stage": STAGES}
"""The values of columns that have few."""


def check_rows(table: pa.Table, schema: pa.Schema) -> None:
    """Check rows that may come from somebody else.

    Args:
        schema: That of the table. All columns of a schema without `stage` have values in every row.

    Raises:
        ValueError: Columns or their types differ, or a value is missing, or is one that rayfed never writes.
    """
    if table.schema.names != schema.names:
        unexpected = sorted(set(table.schema.names) ^ set(schema.names))
        raise ValueError(f"its columns differ, as in {shown(unexpected)}")
    for field in table.schema:
        if pa.types.is_dictionary(field.type):
            kind = field.type.value_type
        else:
            kind = field.type
        if kind != schema.field(field.name).type:
            raise ValueError(f"its column {field.name} is {kind}")
    given = schema.names
    if "stage" in given:  # the costs of a round may be unknown
        given = given[: given.index("stage") + 1]
    for name in given:
        if table[name].null_count:
            raise ValueError(f"its column {name} lacks values")
    for name in _ALLOWED.keys() & set(schema.names):
        for value in pc.unique(table[name]).to_pylist():
            if value not in _ALLOWED[name]:
                raise ValueError(f"its column {name} has {shown(value)}")


def in_memory(schema: pa.Schema) -> pa.Schema:
    """Return the schema of a table's rows in memory: dictionaries in place of strings."""
    fields = []
    for field in schema:
        if pa.types.is_string(field.type):
            kind = _DICTIONARY
        else:
            kind = field.type
        fields.append((field.name, kind))
    return pa.schema(fields)


def string_columns(schema: pa.Schema) -> list[str]:
    """Return the names of the columns of strings."""
    return [field.name for field in schema if pa.types.is_string(field.type)]


_SCORES = in_memory(pa.schema(_columns(Score)))


@functools.cache
def no_scores() -> pa.RecordBatch:
    """Return the columns of the scores of a round that has none. Arrays are made late: pyarrow imports pandas then."""
    return pa.RecordBatch.from_pylist([], schema=_SCORES)


def score_columns(scores: Sequence[Score]) -> pa.RecordBatch:
    """Return scores as columns, in the order of the fields of `Score`."""
    arrays = []
    for field in _SCORES:
        values = [getattr(score, field.name) for score in scores]
        if pa.types.is_dictionary(field.type):
            array = pa.array(values, pa.string()).dictionary_encode()
        else:
            array = pa.array(values, field.type)
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, schema=_SCORES)


def to_bytes(columns: pa.RecordBatch) -> bytes:
    """Return columns as bytes, which are cheap to send and to keep."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, columns.schema) as writer:
        writer.write_batch(columns)
    return bytes(stream.getvalue())


def from_bytes(content: bytes) -> pa.RecordBatch:
    """Return the columns that `to_bytes` packed."""
    return pa.ipc.open_stream(content).read_next_batch()


def metrics_rows(rounds: Iterable[tuple[int, bytes]], of_trial: Mapping[str, Any]) -> pa.Table:
    """Return rows of the table `metrics`.

    Args:
        rounds: Rounds by their number, with the columns of their scores as `to_bytes` packed them.
        of_trial: The values of `TRIAL_COLUMNS`.
    """
    schema = in_memory(METRICS_SCHEMA)
    batches = []
    for number, packed in rounds:
        columns = from_bytes(packed)
        rows = columns.num_rows
        arrays = []
        for name, _ in TRIAL_COLUMNS:
            arrays.append(_repeated(of_trial[name], rows, schema.field(name).type))
        arrays.append(_repeated(number, rows, pa.int32()))
        batches.append(pa.RecordBatch.from_arrays([*arrays, *columns.columns], schema=schema))
    return pa.Table.from_batches(batches, schema)


def rounds_rows(records: Iterable[Record], of_trial: Mapping[str, Any]) -> pa.Table:
    """Return rows of the table `rounds`, as `metrics_rows` does."""
    rows = [{**of_trial, **_round_row(record)} for record in records]
    return pa.Table.from_pylist(rows, schema=in_memory(ROUNDS_SCHEMA))


def record_of(row: Mapping[str, Any]) -> Record:
    """Return the record of a row of the table `rounds`, without what other tables have."""
    values = {field.name: row[field.name] for field in dataclasses.fields(Record) if field.name in row}
    values["seconds"] = {part: row[f"seconds_{part}"] for part in SECONDS}
    values["bytes_down"] = dict(row["bytes_down_by_field"])
    values["bytes_up"] = dict(row["bytes_up_by_field"])
    values["busy"] = row["busy_seconds"]
    values["predicted"] = row["predicted_seconds"]
    return Record(**values)


def scores_by_round(metrics: pa.Table) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Yield the scores of each round of a trial; `metrics` has its rows of that table, in the order of rounds."""
    numbers = metrics["round"].to_numpy()
    firsts = np.unique(numbers, return_index=True)[1]
    scores = metrics.select(_SCORES.names).unify_dictionaries()
    for first, end in itertools.pairwise([*firsts.tolist(), len(numbers)]):
        (batch,) = scores.slice(first, end - first).combine_chunks().to_batches()
        yield int(numbers[first]), batch


def predictions_rows(records: Iterable[Record], of_trial: Mapping[str, Any]) -> pa.Table:
    """Return rows of the table `predictions`, as `metrics_rows` does: outputs and labels as flat lists."""
    rows = []
    for record in records:
        for one in record.predictions:
            row = {**of_trial, **one._asdict(), "round": record.round, "n": len(one.outputs)}
            row["outputs"] = one.outputs.ravel()
            row["labels"] = one.labels.ravel()
            rows.append(row)
    return pa.Table.from_pylist(rows, schema=in_memory(PREDICTIONS_SCHEMA))


def events_rows(events: Iterable[Event], of_trial: Mapping[str, Any]) -> pa.Table:
    """Return rows of the table `events`, as `metrics_rows` does."""
    rows = []
    for event in events:
        when = datetime.datetime.fromtimestamp(event.time, datetime.UTC)
        rows.append({**of_trial, **vars(event), "time": when})
    return pa.Table.from_pylist(rows, schema=in_memory(EVENTS_SCHEMA))


def _round_row(record: Record) -> dict[str, Any]:
    row = {
        "bytes_down": sum(record.bytes_down.values()),
        "bytes_up": sum(record.bytes_up.values()),
        "bytes_down_by_field": list(record.bytes_down.items()),
        "bytes_up_by_field": list(record.bytes_up.items()),
        "sampled": record.sampled,
        "busy_seconds": record.busy,
        "predicted_seconds": record.predicted,
    }
    if record.sampled is None:
        row["sampled"] = record.cohort
    for part in SECONDS:
        row[f"seconds_{part}"] = record.seconds[part]
    for name in ROUNDS_SCHEMA.names[len(TRIAL_COLUMNS) :]:
        if name not in row:
            row[name] = getattr(record, name)
    return row


def _repeated(value: Any, rows: int, kind: pa.DataType) -> pa.Array:
    if not pa.types.is_dictionary(kind):
        return pa.repeat(pa.scalar(value, kind), rows)
    places = pa.repeat(pa.scalar(0, kind.index_type), rows)
    return pa.DictionaryArray.from_arrays(places, pa.array([value], kind.value_type))
