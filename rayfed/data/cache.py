"""Arrays that take long to make, kept on disk; nothing depends on whether they were."""

import contextlib
import hashlib
import json
import os
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]

# What numpy and zipfile raise on a file that is not there, or that is damaged in any way.
UNREADABLE = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def folder() -> Path:
    """Where arrays are kept: the environment variable RAYFED_CACHE, else .cache/rayfed in the home folder."""
    return Path(os.environ.get("RAYFED_CACHE") or os.path.expanduser("~/.cache/rayfed"))


def cached(name: str, key: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
    """What `make` returns, from the cache where it is there.

    `key` holds everything that the arrays depend on, and a format version to raise when `make` changes. A cache that
    cannot be read or written, or that holds a damaged file, only costs time.
    """
    text = json.dumps(dict(key), sort_keys=True)
    path = folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"
    with contextlib.suppress(*UNREADABLE), np.load(path, allow_pickle=False) as stored:
        if str(stored["key"]) == text:
            return {field: stored[field] for field in stored.files if field != "key"}
    arrays = make()
    with contextlib.suppress(OSError):
        _write(path, {**arrays, "key": np.array(text)})
    return arrays


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


def digest(*arrays: np.ndarray) -> str:
    """A sha256 of shapes, dtypes and contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
