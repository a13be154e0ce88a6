"""The `trials` table: one row a trial, with every configuration value as its own column under its dotted name.

Algorithms have different hyperparameters, so trials have different columns, and a reader of many Parquet files takes
the columns of the first. The table is therefore one file, which every trial replaces in turn under a lock. While trials
run, give `pandas.read_parquet` the folder `trials` and not the file in it: given a file's path, pyarrow opens it twice
and may take the columns of one version and the rows of the next.
"""

import datetime
import importlib.metadata
import json
import math
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayfed.results.files import check_name, replace_parquet

STATUSES = ("running", "done", "stopped", "failed", "diverged", "interrupted")
"""`stopped`: ended early by a sweep's scheduler; `interrupted`: by Ctrl-C."""

FIXED: dict[str, pa.DataType] = {
    "trial": pa.string(),
    "experiment": pa.string(),
    "algorithm": pa.string(),
    "seed": pa.int64(),
    "status": pa.string(),
    "error": pa.string(),
    "traceback": pa.string(),
    "started": pa.timestamp("us", tz="UTC"),
    "seconds": pa.float64(),
    "rounds_done": pa.int64(),
    "weights_hash": pa.string(),
    "default_eval_point": pa.string(),
    "partition_hash": pa.string(),
    "code_hash": pa.string(),
    "parameters": pa.int64(),
    "macs": pa.int64(),
    "version_rayfed": pa.string(),
    "version_python": pa.string(),
    "version_torch": pa.string(),
    "version_ray": pa.string(),
    "version_numpy": pa.string(),
}
"""The columns that every trials table has, first and in this order. `scored` is the point that the paper scores;
`partition_hash` says who holds which rows of the named data, and of a user's own clients what they hold; `code_hash`
is of the user's own classes that the configuration names, null without any; `parameters` and `macs`, the
multiply-accumulates of one example's forward pass, are the model's."""
COUNTS_OR_SHARES = ("cohort", "unseen_clients")
"""Where 1 and 1.0 are not the same: one client, and all of them."""


def record_trial(folder: str | Path, experiment: str, trial: str, values: Mapping[str, Any]) -> None:
    """Puts `values` into the row of `trial`, which begins as running, now, with the versions installed here.

    Keys are the fixed columns and dotted configuration names; a mapping inside is flattened to dotted names, and
    `algorithm` is `algorithm.name` where it is not given. Keys that are not given keep what they had. A column
    has one type: values of several kinds, and lists, become JSON text, as do whole numbers beside shares.
    Safe from many processes at once, also on several machines where the file system has working locks.

    Raises:
        UsageError: a name of the experiment or the trial that cannot be a file's name.
        ValueError: an unknown status.
    """
    check_name(experiment, "experiment")
    check_name(trial, "trial")
    if (status := values.get("status", "running")) not in STATUSES:
        raise ValueError(f"status {status!r}: known are {', '.join(STATUSES)}")
    fresh = dict(_flat(values))
    if "algorithm" not in fresh and "algorithm.name" in fresh:  # a configuration tree has only the latter
        fresh["algorithm"] = fresh["algorithm.name"]
    if fresh.get("error") is not None:
        fresh["error"] = " ".join(str(fresh["error"]).split())
    path = Path(folder) / experiment / "trials" / "trials.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.with_name(".trials.lock")):
        rows = pq.ParquetFile(path).read().to_pylist() if path.exists() else []
        row = next((row for row in rows if row["trial"] == trial), None)
        if row is None:
            row = {"status": "running", "started": datetime.datetime.now(datetime.UTC), **versions()}
            rows.append(row)
        row.update(fresh, trial=trial, experiment=experiment)
        replace_parquet(trials_table(rows), path)


def recorded(folder: str | Path, experiment: str, trial: str, column: str) -> Any:
    """What stands in a column of `trial`, where a resume would use what the trial has left: it is done, or saved."""
    home = Path(folder) / experiment
    path = home / "trials" / "trials.parquet"
    if not path.is_file():
        return None
    rows = pq.ParquetFile(path).read(use_threads=False).to_pylist()
    row: dict[str, Any] = next((row for row in rows if row["trial"] == trial), {})
    used = row.get("status") == "done" or (home / "checkpoints" / f"{trial}.pt").exists()
    return row.get(column) if used else None


def versions() -> dict[str, str | None]:
    """The columns `version_*`: what is installed here, None where a package is not."""
    packages = {"rayfed": "rayfed-sim", "torch": "torch", "ray": "ray", "numpy": "numpy"}
    return {
        "version_python": platform.python_version(),
        **{f"version_{name}": _version(package) for name, package in packages.items()},
    }


def trials_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """`rows` as one table: the fixed columns, then the others as they first appear; a value not given is null."""
    rows = list(rows)
    others = dict.fromkeys(key for row in rows for key in row if key not in FIXED)
    columns = {name: pa.array([_fixed(row.get(name), kind) for row in rows], kind) for name, kind in FIXED.items()}
    return pa.table({**columns, **{name: _one_type([row.get(name) for row in rows], name) for name in others}})


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _fixed(value: Any, kind: pa.DataType) -> Any:
    if value is None:
        return None
    if pa.types.is_string(kind):
        return str(value)
    if pa.types.is_timestamp(kind) and isinstance(value, (int, float)):
        return datetime.datetime.fromtimestamp(value, datetime.UTC)
    return value


def _one_type(values: list[Any], name: str) -> pa.Array:
    values = [_plain(value) for value in values]
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(value is None or abs(value) < 2**63 for value in values):
        return pa.array(values, pa.int64())
    if float in kinds and kinds <= ({float} if name in COUNTS_OR_SHARES else {int, float}):
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    texts = [value if value is None or isinstance(value, str) else json.dumps(value, default=str) for value in values]
    return pa.array(texts, pa.string())


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None  # pandas gives NaN for null, and a configuration has no use for it
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value, default=str)
    if callable(getattr(value, "item", None)):  # a NumPy scalar
        return value.item()
    return str(value)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds `path` against other processes and threads; the system lets go when a process dies, also by kill -9."""
    with open(path, "a+b") as file:
        _lock(file.fileno())
        yield  # closing the file lets go


_lock: Callable[[int], None]
if sys.platform == "win32":
    import msvcrt

    def _lock(descriptor: int) -> None:
        msvcrt.locking(descriptor, msvcrt.LK_LOCK, 1)
else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
