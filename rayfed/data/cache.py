"""A disk cache for arrays that are expensive to compute; results never depend on whether it was hit."""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from filelock import FileLock

from rayfed.core.paths import absolute
from rayfed.data.readers.files import note, noted

Arrays = dict[str, np.ndarray]
Shape = tuple[int, ...]
Create = Callable[[str, Shape, "np.dtype | str"], np.ndarray]


class CacheUnusable(Exception):
    """Raised when the cache folder cannot be written or has no room."""


def cache_folder() -> Path:
    """Return the cache folder: the environment variable RAYFED_CACHE, else ~/.cache/rayfed."""
    return absolute(os.environ.get("RAYFED_CACHE") or "~/.cache/rayfed")


def cached_arrays(name: str, key: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
    """Return the arrays that `make` computes; see `cached` for the arguments."""

    def write(create: Create) -> None:
        for field, array in make().items():
            create(field, array.shape, array.dtype)[...] = array

    return cached(name, key, write)


def memory_mapped(
    name: str, key: Mapping[str, object], shape: Shape, dtype: np.dtype | str, fill: Callable[[np.ndarray], None]
) -> np.ndarray:
    """Return one array, which `fill` writes into a writable array [*shape] of zeros; otherwise as `cached`.

    Shape and dtype become part of the key.
    """
    whole_key = {**key, "shape": shape, "dtype": np.dtype(dtype).str}
    return cached(name, whole_key, lambda create: fill(create("array", shape, dtype)))["array"]


def array_hash(*arrays: np.ndarray) -> str:
    """Return the SHA-256 (hexadecimal) of the arrays' shapes, dtypes and contents."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def cached(name: str, key: Mapping[str, object], write: Callable[[Create], None]) -> Arrays:
    """Return read-only arrays on disk, which `write` creates the first time; processes of a machine share their pages.

    The arrays are `np.memmap`, unless the cache cannot hold them: then they are in memory and created anew each time.
    The files appear completely or not at all, and are created again if they are truncated. If several processes need
    them at once, one process creates them and the others wait. What `write` notes is kept and noted every time.

    Args:
        name: Prefix of the name of the arrays' folder.
        key: Everything that the arrays depend on, and a format version to raise when `write` changes.
        write: Called with `create`, which returns a writable array of zeros for a name, a shape and a type.
    """
    digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
    folder = cache_folder() / f"{name}-{digest[:16]}"

    def write_with_notes(create: Create) -> None:
        with noted() as lines:
            write(create)
        if lines:
            create("notes", (len(lines),), f"<U{max(map(len, lines))}")[...] = sorted(lines)

    arrays = _opened(folder)
    try:
        if arrays is None:
            with locked(folder.with_name(f"{name}.lock")):
                arrays = _opened(folder) or _written(folder, write_with_notes)
    except CacheUnusable:
        arrays = _in_memory(write_with_notes)
    for line in arrays.pop("notes", np.empty(0, str)).tolist():
        note(line)
    return arrays


def _opened(folder: Path) -> Arrays | None:
    """Return the arrays in a folder; None if there is none, or one is truncated."""
    try:
        return {path.stem: np.load(path, mmap_mode="r") for path in folder.glob("*.npy")} or None
    except (OSError, EOFError, ValueError):
        return None


def _written(folder: Path, write: Callable[[Create], None]) -> Arrays:
    """Fill a folder beside `folder` and rename it, so that readers see all arrays or none, even after a crash."""
    created = []
    temporary = folder.with_name(f"{folder.name}.part")

    def create(field: str, shape: Shape, dtype: np.dtype | str) -> np.ndarray:
        with _os_errors_as_unusable():
            path = temporary / f"{field}.npy"
            created.append(np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape))
            if hasattr(os, "posix_fallocate"):  # writing to a page without space on the disk kills the process
                with open(path, "r+b") as file:
                    os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
        return created[-1]

    try:
        with _os_errors_as_unusable():
            for left in (temporary, folder):  # by a writer that was killed; truncated
                shutil.rmtree(left, ignore_errors=True)
            temporary.mkdir()
        write(create)
        with _os_errors_as_unusable():
            for array in created:
                array.flush()
            temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return _opened(folder) or {}


def _in_memory(write: Callable[[Create], None]) -> Arrays:
    arrays: Arrays = {}

    def create(field: str, shape: Shape, dtype: np.dtype | str) -> np.ndarray:
        arrays[field] = np.zeros(shape, dtype)
        return arrays[field]

    write(create)
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    with _os_errors_as_unusable():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _os_errors_as_unusable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheUnusable(" ".join(str(error).split())) from error
