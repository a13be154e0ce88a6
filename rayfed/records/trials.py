"""The table `trials`: one row per trial, with a column for every configuration value under its dotted name.

Every trial has its row in a file of its own, `.rows/<trial>.json`, so that recording costs the same with any number of
trials. These files are merged into one Parquet file for pandas, now and then while trials run and when a command ends:
trials of different algorithms have different columns, and a reader of many files would take those of the first. While
trials run, give `pandas.read_parquet` the folder `trials` and not the file in it: pyarrow opens a file's path twice,
and may take the columns of one version and the rows of the next.

Before a command starts, it claims all trials that it is going to run (`claimed`), so that no other command begins them;
`rayfed.records.owners` has the claims.

Rows may come from somebody else. So their fields are checked when they are read, for all readers. A row that cannot be
read takes no other row with it.
"""

import contextlib
import datetime
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
from filelock import FileLock

from rayfed.core.errors import StorageError, UsageError, one_line, printable
from rayfed.core.machine import versions
from rayfed.core.options import is_int64
from rayfed.core.paths import check_name
from rayfed.records.checkpoint_store import CheckpointStore
from rayfed.records.files import SCHEMA, check_schema, replace_parquet
from rayfed.records.owners import Owner, claims, describe, is_alive, remove_dead
from rayfed.records.storage import Storage, open_storage, storage_errors
from rayfed.records.trial_rows import FIXED, checked_row

TRIALS_FILE = "trials.parquet"
MERGING_SHARE = 0.02
"""The fraction of the time that merging rows into the file for pandas may take while trials run."""
_NOT_CONFIGURATION = ("results", "experiment", "resume")
_ROWS = ".rows"  # which readers of Parquet skip
_SCHEMA_KEY = "rayfed.schema"
_THREADS = 16  # an object store takes several requests at a time
_JSON_BEGINS = tuple("[{-0123456789")
_THREAD_LOCK = threading.Lock()
_MERGE_NEXT: dict[str, float] = {}  # when this process may next merge the rows of a table, by its location


def record_trial(folder: str | Path, experiment: str, trial: str, values: Mapping[str, Any]) -> None:
    """Write `values` to the row of `trial`; columns that are not given keep their values.

    A new row begins with the status "running", the present time and the installed versions. Each column has one type:
    lists and values of several types become JSON strings, and integers beside fractions become fractions. Any number of
    processes may call this at once, also on several machines if the file system has working locks.

    Args:
        values: The fixed columns and dotted configuration names. Nested mappings are flattened to dotted names, and
            `algorithm` defaults to `algorithm.name`.

    Raises:
        UsageError: The name of the experiment or the trial cannot be the name of a file, or another process runs the
            trial.
    """
    check_name(experiment, "experiment")
    check_name(trial, "trial")
    new = dict(flattened(values))
    if "algorithm" not in new and "algorithm.name" in new:  # a configuration tree has only the latter
        new["algorithm"] = new["algorithm.name"]
    if new.get("error") is not None:
        new["error"] = " ".join(str(new["error"]).split())
    home = open_storage(folder).child(experiment)
    table = home.child("trials")
    with _locked(table):
        row = _read_row(table, trial)
        if row is None:
            row = {"status": "running", "started": datetime.datetime.now(datetime.UTC), **_versions()}
        before = row.get("owner")
        after = new.get("owner")
        if before and after and before != after and row["status"] == "running" and is_alive(home, before):
            raise _in_use(trial, before)
        row.update(new, trial=trial, experiment=experiment)
        plain = {key: _plain(value) for key, value in row.items()}
        content = {_SCHEMA_KEY: SCHEMA, **plain}
        encoded = json.dumps(content).encode()
        table.child(_ROWS).write(f"{trial}.json", encoded)
        if time.monotonic() >= _MERGE_NEXT.get(table.location, 0.0):
            _merge(table)


def merge_trials(folder: str | Path, experiment: str) -> None:
    """Write the rows of all trials to the file that pandas reads."""
    table = open_storage(folder).child(experiment, "trials")
    with _locked(table):
        _merge(table)


def _merge(table: Storage) -> None:
    began = time.monotonic()
    rows = read_trials(table)
    if rows:
        replace_parquet(trials_table(rows), table, TRIALS_FILE)
    now = time.monotonic()
    _MERGE_NEXT[table.location] = now + (now - began) / MERGING_SHARE


def mark_interrupted(folder: str | Path, experiment: str, trials: Iterable[str]) -> int:
    """Record the running ones of `trials` as interrupted, and return how many of `trials` are done."""
    table = open_storage(folder).child(experiment, "trials")
    statuses = {trial: (_read_row(table, trial) or {}).get("status") for trial in trials}
    for trial, status in statuses.items():
        if status == "running":
            record_trial(folder, experiment, trial, {"status": "interrupted"})
    merge_trials(folder, experiment)  # since the process may end without leaving `claimed`
    return list(statuses.values()).count("done")


@contextlib.contextmanager
def claimed(folder: str | Path, experiment: str, trials: Iterable[str]) -> Iterator[None]:
    """Within, no other command begins one of `trials`. Afterwards, the table is merged.

    Raises:
        UsageError: Another process is running one of them, or is going to.
        StorageError: The claim cannot be written.
    """
    home = open_storage(folder).child(experiment)
    wanted = set(trials)
    with storage_errors(home.location), _locked(home.child("trials")):
        _check_unclaimed(home, wanted)
        remove_dead(home)
        claim = Owner(home, sorted(wanted))
    try:
        yield
    finally:
        claim.release()
        # The rows are safe, and the error that ended the command says more than an error of the merge.
        with contextlib.suppress(OSError, StorageError, UsageError):
            merge_trials(folder, experiment)


def _check_unclaimed(home: Storage, wanted: set[str]) -> None:
    for row in read_trials(home.child("trials")):
        is_claimed = row["trial"] in wanted and row["status"] == "running" and row["owner"]
        if is_claimed and is_alive(home, row["owner"]):
            raise _in_use(row["trial"], row["owner"])
    for owner, trials in claims(home):
        both = sorted(trials & wanted)
        if both:
            others = ""
            if len(both) > 1:
                others = f" (and {len(both) - 1} more)"
            raise _in_use(f"{both[0]}{others}", owner, "is going to run it")


def _in_use(trial: str, owner: str, does: str = "is running it") -> UsageError:
    return UsageError(f"{trial}: {describe(owner)} {does}; wait, or end that process first")


def recorded_value(folder: str | Path, experiment: str, trial: str, column: str) -> Any:
    """Return a column of `trial`; None if the trial is not done and has no checkpoint to resume from."""
    home = open_storage(folder).child(experiment)
    row = _read_row(home.child("trials"), trial) or {}
    reusable = row.get("status") == "done"
    if row and not reusable:
        reusable = CheckpointStore(home, trial).exists()
    if reusable:
        return row.get(column)
    return None


def read_trials(folder: Storage) -> list[dict[str, Any]]:
    """Return the rows of the table `trials` in its folder, in the order in which trials began; none without a table.

    Every row has all columns of `FIXED`, with values of their types. Rows that cannot be read are left out;
    `readable_trials` says which.

    Raises:
        OSError: A row cannot be read.
        UsageError: A row has another schema than this version of rayfed.
    """
    return readable_trials(folder)[0]


def readable_trials(folder: Storage) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return what `read_trials` returns, and by trial a line on each row that cannot be read."""
    names = []
    for file in folder.child(_ROWS).files():
        if file.endswith(".json"):
            names.append(file.removesuffix(".json"))
    with ThreadPoolExecutor(_THREADS) as pool:
        found = list(pool.map(lambda name: _row_or_fault(folder, name), names))
    rows = []
    faults = {}
    for name, (row, fault) in zip(names, found, strict=True):
        if row is not None:
            rows.append(row)
        if fault is not None:
            faults[name] = fault
    rows.sort(key=lambda row: (row["started"], row["trial"]))
    return rows, faults


def _row_or_fault(table: Storage, trial: str) -> tuple[dict[str, Any] | None, str | None]:
    """Return the row of a trial and why it cannot be read; either may be None, and both are if it is gone."""
    try:
        return _read_row(table, trial), None
    except StorageError as error:
        return None, printable(str(error))


def _read_row(table: Storage, trial: str) -> dict[str, Any] | None:
    """Return the row of a trial, or None if it has none.

    Raises:
        OSError: The row cannot be read.
        StorageError: The row is damaged.
        UsageError: The row has another schema than this version of rayfed.
    """
    rows = table.child(_ROWS)
    file = f"{trial}.json"
    try:
        content = json.loads(rows.read(file))
        number = content.pop(_SCHEMA_KEY, "none")
    except FileNotFoundError:
        return None
    except _NO_ROW as error:
        raise _damaged(f"{rows.location}/{file}", error) from error
    check_schema(number, f"{rows.location}/{file}")
    try:
        return checked_row(content, trial)
    except _NO_ROW as error:
        raise _damaged(f"{rows.location}/{file}", error) from error


_NO_ROW = (ValueError, TypeError, AttributeError, RecursionError)


def _damaged(file: str, error: Exception) -> StorageError:
    return StorageError(
        f"{file}: damaged, not the row that rayfed wrote ({one_line(error)[:120]}); restore it, or delete it and run "
        "its trial again"
    )


def recorded_configuration(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration in a row, which a run takes: dotted keys, without `results`, `experiment` and nulls.

    `row` may come from pandas, where null is NaN and integers beside nulls are floats.
    """
    configuration = {}
    for key, value in row.items():
        key = str(key)
        value = _plain(value)
        is_key = key == "seed" or (key not in FIXED and key not in _NOT_CONFIGURATION)
        if is_key and value is not None:
            configuration[key] = _decoded(value)
    return configuration


@functools.cache  # it reads files, and nobody installs packages under a running trial
def _versions() -> dict[str, str | None]:
    """Return the columns `version_*`; None for a package that is not installed."""
    numbers = versions("rayfed-sim", "torch", "ray", "numpy").values()
    columns = ("version_python", "version_rayfed", "version_torch", "version_ray", "version_numpy")
    return dict(zip(columns, numbers, strict=True))


def trials_table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Return `rows` as one table: the fixed columns, then the others as they first appear; missing values are null."""
    rows = list(rows)
    columns = {}
    for name in dict.fromkeys(itertools.chain(FIXED, *rows)):
        values = [row.get(name) for row in rows]
        if name in FIXED:
            columns[name] = pa.array(values, FIXED[name])
        else:
            columns[name] = _one_type(values)
    return pa.table(columns)


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a nested mapping with their dotted keys."""
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _one_type(values: list[Any]) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    integers = [value for value in values if isinstance(value, int)]
    are_numbers = kinds <= {int, float} and all(map(is_int64, integers))
    if kinds == {int} and are_numbers:
        return pa.array(values, pa.int64())
    if float in kinds and are_numbers:
        floats = []
        for value in values:
            if value is not None:
                value = float(value)
            floats.append(value)
        return pa.array(floats, pa.float64())
    texts = []
    for value in values:
        if value is None or isinstance(value, str):
            texts.append(value)
        else:
            texts.append(json.dumps(value, default=str))
    return pa.array(texts, pa.string())


def _decoded(value: Any) -> Any:
    """Return the value of an option from its column, where lists are JSON, and so are numbers beside strings."""
    if isinstance(value, str) and (value[:1] in _JSON_BEGINS or value in ("true", "false")):
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None  # pandas reads null as NaN, which no configuration holds
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, Mapping)):
        return json.dumps(value, default=str)
    if callable(getattr(value, "item", None)):  # a NumPy scalar
        return value.item()
    return str(value)


@contextlib.contextmanager
def _locked(folder: Storage) -> Iterator[None]:
    """Lock the table against other processes and threads; in an object store, which has no locks, against threads.

    The system unlocks the table when a process dies, also by kill -9.
    """
    if folder.local is None:
        with _THREAD_LOCK:
            yield
        return
    folder.local.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.local / ".trials.lock"):
        yield
