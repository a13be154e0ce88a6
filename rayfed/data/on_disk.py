"""Arrays on disk: a cache for those that are expensive to compute, and rows that are read only when they are used.

Results never depend on whether the cache was hit.
"""

import contextlib
import hashlib
import json
import math
import mmap
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock

from rayfed.core.errors import UsageError
from rayfed.core.paths import absolute
from rayfed.data.readers.files import note, noted

# bytes per block, and blocks, by which machines compare a file: 64 MiB
BLOCK = 1 << 16
BLOCKS = 1 << 10
REMEDY = "set RAYFED_CACHE to a folder that all machines share, or start the run once on each machine"
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
    content = json.dumps(dict(key), sort_keys=True)
    digest = hashlib.sha256(content.encode()).hexdigest()
    folder = cache_folder() / f"{name}-{digest[:16]}"

    def write_with_notes(create: Create) -> None:
        with noted() as lines:
            write(create)
        if lines:
            longest = max(map(len, lines))
            stored = create("notes", (len(lines),), f"<U{longest}")
            stored[...] = sorted(lines)

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
        arrays = {}
        for path in folder.glob("*.npy"):
            arrays[path.stem] = np.load(path, mmap_mode="r")
        return arrays or None
    except (OSError, EOFError, ValueError):
        return None


def _written(folder: Path, write: Callable[[Create], None]) -> Arrays:
    """Fill a folder beside `folder` and rename it, so that readers see all arrays or none, even after a crash."""
    created = []
    temporary = folder.with_name(f"{folder.name}.part")

    def create(field: str, shape: Shape, dtype: np.dtype | str) -> np.ndarray:
        with _os_errors_as_unusable():
            path = temporary / f"{field}.npy"
            array = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
            created.append(array)
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


class ArrayFile:
    """An array [N, ...] in a file. Pickled, it is only a path: the receiving process opens the file itself.

    Rows are read, not memory-mapped. Pages then belong to the operating system's cache, which all processes share. A
    failing disk raises OSError instead of killing the process.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self.path = path
        self.offset = offset
        self.shape = shape
        self.dtype = dtype
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._checksum: int | None = None
        self._file: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._checksum is None:
            self._checksum = self._sum(self._descriptor())
        return {**self.__dict__, "_file": None}

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` [n, ...], contiguous, with `rows`; each contiguous run is read at once, in the file's order."""
        if not out.nbytes:
            return
        file = self._descriptor()
        target = out.data.cast("B")
        order = np.argsort(rows, kind="stable")
        follows = (np.diff(rows[order]) == 1) & (np.diff(order) == 1)
        breaks = np.flatnonzero(~follows) + 1
        firsts = np.concatenate([[0], breaks])
        counts = np.diff(np.append(firsts, len(rows))) * self.row_bytes
        sources = self.offset + rows[order[firsts]] * self.row_bytes
        targets = order[firsts] * self.row_bytes
        runs = list(zip(sources.tolist(), counts.tolist(), targets.tolist(), strict=True))
        if hasattr(os, "posix_fadvise"):  # lets the system fetch all runs from the disk at once
            for source, count, _ in runs:
                os.posix_fadvise(file, source, count, os.POSIX_FADV_WILLNEED)
        for source, count, position in runs:
            self._fill(file, source, target[position : position + count])

    def _fill(self, file: int, source: int, target: memoryview) -> None:
        while target:
            count = os.preadv(file, [target], source)
            if not count:
                raise OSError(f"{self.path}: ends at byte {source}; it was longer when it was opened")
            source += count
            target = target[count:]

    def _descriptor(self) -> int:
        """Return the descriptor of the open file; after unpickling, check that the file is the one that was pickled."""
        if self._file is None:
            try:
                file = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise UsageError(f"{self.path}: {error.strerror} on this machine; {REMEDY}") from error
            weakref.finalize(self, os.close, file)
            if self._checksum is not None and self._sum(file) != self._checksum:
                raise UsageError(f"{self.path}: differs from that of the machine that started the run; {REMEDY}")
            self._file = file
        return self._file

    def _sum(self, file: int) -> int:
        """Return the CRC-32 of evenly spaced blocks, with the first and the last block, or of all of a small file."""
        size = self.shape[0] * self.row_bytes
        crc = 0
        count = -(-size // BLOCK)
        blocks: Iterable[int] = range(count)
        if count > BLOCKS:
            blocks = (k * (count - 1) // (BLOCKS - 1) for k in range(BLOCKS))
        for block in blocks:
            start = block * BLOCK
            content = os.pread(file, min(BLOCK, size - start), self.offset + start)
            crc = zlib.crc32(content, crc)
        return crc


class LazyRows:
    """Rows of an `ArrayFile`, or of what reads rows like it, with the interface of a numpy array.

    Each index or slice reads the selected rows anew.
    """

    def __init__(self, file: Any, rows: np.ndarray):
        self.file = file
        self.rows = rows

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.file.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self.file.dtype

    @property
    def ndim(self) -> int:
        return len(self.file.shape)

    @property
    def nbytes(self) -> int:
        return len(self.rows) * self.file.row_bytes

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: Any) -> "LazyRows":
        """Return a selection of these rows without reading them."""
        return LazyRows(self.file, self.rows[rows])

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fill `out` [n, ...], contiguous, with the selected rows."""
        self.file.read(self.rows[rows], out)

    def __getitem__(self, index: Any) -> np.ndarray:
        if not isinstance(index, tuple):
            index = (index,)
        first, *others = index
        rows = np.arange(len(self))[first]
        out = np.empty((rows.size, *self.shape[1:]), self.dtype)
        self.read(rows.reshape(-1), out)
        values = out.reshape(rows.shape + self.shape[1:])
        if others:
            return values[(slice(None),) * rows.ndim + tuple(others)]
        return values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows of a file are copied when they are read")
        values = self[:]
        if dtype is None:
            return values
        return values.astype(dtype)


def as_lazy_rows(array: Any) -> Any:
    """Return `LazyRows` for a read-only `np.memmap` of contiguous rows; return anything else unchanged."""
    mapping = None
    if isinstance(array, np.memmap):
        mapping = getattr(array, "_mmap", None)
    if mapping is None or array.mode != "r" or not array.filename:
        return array
    if not array.ndim or not array.flags.c_contiguous:
        return array
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # position in the file at which the mapping starts
    address = array.__array_interface__["data"][0]
    inside = address - np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    path = Path(array.filename).absolute()
    file = ArrayFile(path, start + inside, array.shape, array.dtype)
    return LazyRows(file, np.arange(len(array)))


def select_rows(array: Any, rows: Any) -> Any:
    """Return `array[rows]`, without reading rows that are in a file."""
    array = as_lazy_rows(array)
    if isinstance(array, LazyRows):
        return array.select(rows)
    return array[rows]
