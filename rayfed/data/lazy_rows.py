"""Rows of an array in a file, as an array that is read only where it is looked at."""

import functools
import math
import mmap
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.array_cache_file import checksum

View = Callable[[np.ndarray], np.ndarray]


class ArrayFile:
    """An array [N, ...] that lies in a file. Sent to another process it is a path: the receiver opens its own file.

    Rows are read, not mapped: pages then count as the machine's cache, which all processes share, and not as theirs,
    and a disk that fails raises OSError instead of killing the process.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self.offset, self.shape, self.dtype = path, offset, shape, dtype
        self.row_bytes = math.prod(shape[1:]) * dtype.itemsize
        self._checksum: int | None = None
        self._file: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self._checksum is None:
            self._checksum = self._sum(self._opened())
        return {**self.__dict__, "_file": None}

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` [n, ...], contiguous, with the rows, each contiguous run of them at once, in the file's order."""
        if not out.nbytes:
            return
        file, target = self._opened(), out.data.cast("B")
        order = np.argsort(rows, kind="stable")
        breaks = np.flatnonzero((np.diff(rows[order]) != 1) | (np.diff(order) != 1)) + 1
        firsts = np.concatenate([[0], breaks])
        counts = np.diff(np.append(firsts, len(rows))) * self.row_bytes
        sources = self.offset + rows[order[firsts]] * self.row_bytes
        runs = list(zip(sources.tolist(), counts.tolist(), (order[firsts] * self.row_bytes).tolist(), strict=True))
        if hasattr(os, "posix_fadvise"):  # what is not in memory comes from the disk all at once, not one by one
            for source, count, _ in runs:
                os.posix_fadvise(file, source, count, os.POSIX_FADV_WILLNEED)
        for source, count, place in runs:
            self._fill(file, source, target[place : place + count])

    def _fill(self, file: int, source: int, target: memoryview) -> None:
        while target:
            got = os.preadv(file, [target], source)
            if not got:
                raise OSError(f"{self.path}: ends at byte {source}; it was longer when it was opened")
            source, target = source + got, target[got:]

    def _opened(self) -> int:
        """The file, opened; one that was sent here is compared with the sender's by the checksum of `mapped`."""
        if self._file is None:
            try:
                file = os.open(self.path, os.O_RDONLY)
            except OSError as error:
                raise UsageError(f"{self.path}: {error.strerror} on this machine; {_REMEDY}") from error
            weakref.finalize(self, os.close, file)
            if self._checksum is not None and self._sum(file) != self._checksum:
                raise UsageError(f"{self.path}: differs on this machine from where the run began; {_REMEDY}")
            self._file = file
        return self._file

    def _sum(self, file: int) -> int:
        return checksum(file, self.shape[0] * self.row_bytes, self.offset)


_REMEDY = "set RAYFED_CACHE to a folder that all machines share, or start the run once on each of them"


class LazyRows:
    """Some rows of an `ArrayFile`, in an order: what code that reads numpy arrays asks of one, and nothing kept.

    An index or a slice reads what it selects, `np.asarray` reads all. `view`, where given, is applied to what was read;
    it must treat each row on its own.
    """

    def __init__(self, file: ArrayFile, rows: np.ndarray, view: View | None = None):
        self.file, self.rows, self.view = file, rows, view

    @functools.cached_property
    def _none(self) -> np.ndarray:
        """No rows, as they would look."""
        nothing = np.empty((0, *self.file.shape[1:]), self.file.dtype)
        return nothing if self.view is None else self.view(nothing)

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self._none.shape[1:])

    @property
    def dtype(self) -> np.dtype:
        return self._none.dtype

    @property
    def ndim(self) -> int:
        return self._none.ndim

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: Any) -> "LazyRows":
        """Some of these rows, still unread."""
        return LazyRows(self.file, self.rows[rows], self.view)

    def with_view(self, view: View) -> "LazyRows":
        """The same rows through `view`, still unread."""
        return LazyRows(self.file, self.rows, view)

    def read(self, rows: np.ndarray, out: np.ndarray) -> None:
        """Fills `out` [n, ...], contiguous, with these of the rows."""
        if self.view is None:
            self.file.read(self.rows[rows], out)
        else:
            raw = np.empty((len(rows), *self.file.shape[1:]), self.file.dtype)
            self.file.read(self.rows[rows], raw)
            out[...] = self.view(raw)

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = np.arange(len(self))[first]
        out = np.empty((rows.size, *self.shape[1:]), self.dtype)
        self.read(rows.reshape(-1), out)
        found = out.reshape(rows.shape + self.shape[1:])
        return found[(slice(None),) * rows.ndim + tuple(others)] if others else found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows of a file are copied when they are read")
        found = self[:]
        return found if dtype is None else found.astype(dtype)


def as_lazy_rows(array: Any) -> Any:
    """A read-only `np.memmap` of contiguous rows as `LazyRows` of its file; anything else as it is."""
    mapping = getattr(array, "_mmap", None) if isinstance(array, np.memmap) else None
    if mapping is None or array.mode != "r" or not array.filename or not array.ndim or not array.flags.c_contiguous:
        return array
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # where in the file the mapping begins
    inside = array.__array_interface__["data"][0] - np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    file = ArrayFile(Path(array.filename).absolute(), start + inside, array.shape, array.dtype)
    return LazyRows(file, np.arange(len(array)))


def select_rows(array: Any, rows: Any) -> Any:
    """`array[rows]`, unread where the array is `LazyRows`."""
    return array.select(rows) if isinstance(array, LazyRows) else array[rows]
