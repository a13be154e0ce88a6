"""Arrays that take long to make, kept on disk; nothing depends on whether they were."""

import contextlib
import hashlib
import json
import math
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.memory import memory_bytes
from rayfed.data.array_cache_file import CacheUnusable, open_array, open_or_create_array

Arrays = dict[str, np.ndarray]

# What numpy and zipfile raise on a file that is not there, or that is damaged in any way.
UNREADABLE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def cache_folder() -> Path:
    """Where arrays are kept: the environment variable RAYFED_CACHE, else .cache/rayfed in the home folder."""
    return Path(os.environ.get("RAYFED_CACHE") or os.path.expanduser("~/.cache/rayfed"))


def cached_arrays(name: str, key: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns, from the cache where it is there.

    `key` holds everything that the arrays depend on, and a format version to raise when `make` changes. A cache that
    cannot be read or written, or that holds a damaged file, only costs time.
    """
    text = json.dumps(dict(key), sort_keys=True)
    path = _path(name, text, "npz")
    with contextlib.suppress(*UNREADABLE), np.load(path, allow_pickle=False) as stored:
        if str(stored["key"]) == text:
            return {field: stored[field] for field in stored.files if field != "key"}
    arrays = make()
    with contextlib.suppress(OSError):
        _write(path, {**arrays, "key": np.array(text)})
    return arrays


def memory_mapped(
    name: str,
    key: Mapping[str, object],
    shape: tuple[int, ...],
    dtype: np.dtype | str,
    fill: Callable[[np.ndarray], None],
) -> np.ndarray:
    """A read-only array on disk, made by `fill` the first time; all processes of a machine share its pages.

    `key` is as for `cached`; shape and dtype become part of it. `fill` gets a writable array [*shape] of zeros. The
    array is a `np.memmap`, except where the cache cannot hold it: then it is an array in memory, made anew each time.
    The file appears as a whole or not at all, and is made again where it is damaged. Of several processes that want
    it at once, one makes it and the others wait.

    Raises:
        UsageError: the cache cannot hold it, and neither can half of the memory.
    """
    kind = np.dtype(dtype)
    text = json.dumps({**key, "shape": shape, "dtype": kind.str}, sort_keys=True)
    path = _path(name, text, "array")
    try:
        found = open_array(path, text, shape, kind)
        return open_or_create_array(path, text, shape, kind, fill) if found is None else found
    except CacheUnusable as unusable:
        size = math.prod(shape) * kind.itemsize
        if size > memory_bytes() / 2:
            raise UsageError(
                f"RAYFED_CACHE={cache_folder()}: {name} needs {size / 1e9:.1f} GB there, but {unusable}; "
                "set the environment variable to a folder with room"
            ) from unusable
    array = np.zeros(shape, kind)
    fill(array)
    array.flags.writeable = False
    return array


def _path(name: str, key: str, kind: str) -> Path:
    return cache_folder() / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.{kind}"


def _write(path: Path, arrays: Arrays) -> None:
    """Writes beside `path` and renames, so that a reader sees a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def array_hash(*arrays: np.ndarray) -> str:
    """A sha256 of shapes, dtypes and contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
