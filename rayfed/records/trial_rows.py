"""The columns of the table `trials`, and the check of a row, which may come from somebody else."""

import datetime
import json
from collections.abc import Callable, Mapping
from typing import Any

import pyarrow as pa

from rayfed.core.errors import shown
from rayfed.core.options import is_int64
from rayfed.core.paths import check_name
from rayfed.core.round_record import POINTS
from rayfed.records.owners import is_owner

STATUSES = ("running", "done", "stopped", "failed", "diverged", "interrupted", "lost")
"""`stopped`: ended early by a sweep's scheduler; `interrupted`: ended by Ctrl-C; `lost`: its command died. The table
still says `running` of a lost trial, and readers find out (see `rayfed.reports.read`)."""

FIXED: dict[str, pa.DataType] = {
    "trial": pa.string(),
    "experiment": pa.string(),
    "algorithm": pa.string(),
    "seed": pa.int64(),
    "status": pa.string(),
    "stop_reason": pa.string(),
    "error": pa.string(),
    "traceback": pa.string(),
    "owner": pa.string(),
    "started": pa.timestamp("us", tz="UTC"),
    "seconds": pa.float64(),
    "rounds_done": pa.int64(),
    "weights_hash": pa.string(),
    "default_eval_point": pa.string(),
    "selection_metric": pa.string(),
    "selection_mode": pa.string(),
    "partition_hash": pa.string(),
    "partition_seed": pa.int64(),
    "test_drawn": pa.bool_(),
    "examples_train": pa.int64(),
    "examples_val": pa.int64(),
    "examples_test": pa.int64(),
    "clients_scored": pa.int64(),
    "vmap_clients": pa.int64(),
    "code_hash": pa.string(),
    "base_hash": pa.string(),
    "parameters": pa.int64(),
    "macs": pa.int64(),
    "version_rayfed": pa.string(),
    "version_python": pa.string(),
    "version_torch": pa.string(),
    "version_ray": pa.string(),
    "version_numpy": pa.string(),
}
"""The columns that every table `trials` has, first and in this order; docs/results.md explains them."""

_READ_AS_NUMBERS = ("rounds", "evaluate.every")
"""Columns of the configuration that readers take for integers."""
_OF_STOPPED = ("rounds", "rounds_done")
"""Columns that the row of a trial which stopped early has."""


def checked_row(content: Mapping[str, Any], trial: str) -> dict[str, Any]:
    """Return a row as it is in its file, with all columns of `FIXED` and `started` as a time.

    Args:
        content: The values by column, as JSON holds them.
        trial: The trial that the name of the file says.

    Raises:
        ValueError: A field has another type than its column, or a value that rayfed never writes.
    """
    row = dict.fromkeys(FIXED) | dict(content)
    json.dumps(row, ensure_ascii=False).encode()  # raises for halves of characters, which no table holds
    row["started"] = _time(row["started"])
    for column, value in row.items():
        if not column.isprintable():
            raise ValueError(f"it has a column {shown(column)}")
        if value is not None and not _fits(column, value):
            raise ValueError(f"{column} is {shown(value)}")
    if row["trial"] != trial:
        raise ValueError(f"it is the row of {shown(row['trial'])}")
    check_name(row["experiment"] or "", "experiment")
    needed = ["status"]
    if row["stop_reason"] is not None:
        needed += _OF_STOPPED
    for column in needed:
        if row.get(column) is None:
            raise ValueError(f"it has no {column}")
    return row


def _fits(column: str, value: Any) -> bool:
    """Return whether a column may have a value."""
    if column in _VALUES:
        return _VALUES[column](value)
    kind = FIXED.get(column)
    if column in _READ_AS_NUMBERS or kind == pa.int64():
        return is_int64(value)
    if kind == pa.float64():
        return isinstance(value, float) or is_int64(value)
    if kind == pa.bool_():
        return isinstance(value, bool)
    return kind != pa.string() or isinstance(value, str)


def _is_name(value: Any) -> bool:
    """Return whether `value` can be the name of a file."""
    return isinstance(value, str) and check_name(value, "name") == value


_VALUES: dict[str, Callable[[Any], bool]] = {
    "status": STATUSES.__contains__,
    "default_eval_point": POINTS.__contains__,
    "selection_mode": ("max", "min").__contains__,
    "owner": is_owner,
    "partition_hash": _is_name,
}
"""The test of a value in columns that have few values, or that name files."""


def _time(text: Any) -> datetime.datetime:
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None or not 1 < time.year < datetime.MAXYEAR:
        raise ValueError(f"started is {shown(text)}, or without a time zone")
    return time
