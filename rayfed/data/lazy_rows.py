"""Rows of an array in a file, behind numpy's interface, which are read only when they are used."""

import math
import mmap
import os
import weakref
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError

BLOCK, BLOCKS = 1 << 16, 1 << 10  # bytes per block, and blocks, by which machines compare a file: 64 MiB
REMEDY = "set RAYFED_CACHE to a folder that all machines share, or start the run once on each machine"


class ArrayFile:
    """An array [N, ...] in a file. Pickled, it is only a path: the receiving process opens the file itself.

    Rows are read, not memory-mapped. Pages then belong to the operating system's cache, which all processes share,
    instead of to each process, and a failing disk raises OSError instead of killing the process.
    """

    def __init__(self, path: Path, offset: int, shape: tuple[int, ...], dtype: np.dtype):
        self.path, self.offset, self.shape, self.dtype = path, offset, shape, dtype
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
        file, target = self._descriptor(), out.data.cast("B")
        order = np.argsort(rows, kind="stable")
        breaks = np.flatnonzero((np.diff(rows[order]) != 1) | (np.diff(order) != 1)) + 1
        firsts = np.concatenate([[0], breaks])
        counts = np.diff(np.append(firsts, len(rows))) * self.row_bytes
        sources = self.offset + rows[order[firsts]] * self.row_bytes
        runs = list(zip(sources.tolist(), counts.tolist(), (order[firsts] * self.row_bytes).tolist(), strict=True))
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
            source, target = source + count, target[count:]

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
        size, crc = self.shape[0] * self.row_bytes, 0
        count = -(-size // BLOCK)
        for block in range(count) if count <= BLOCKS else (k * (count - 1) // (BLOCKS - 1) for k in range(BLOCKS)):
            crc = zlib.crc32(os.pread(file, min(BLOCK, size - block * BLOCK), self.offset + block * BLOCK), crc)
        return crc


class LazyRows:
    """Rows of an `ArrayFile`, or of what reads rows like it, with the interface of a numpy array.

    Each index or slice reads the selected rows anew.
    """

    def __init__(self, file: Any, rows: np.ndarray):
        self.file, self.rows = file, rows

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
        first, *others = index if isinstance(index, tuple) else (index,)
        rows = np.arange(len(self))[first]
        out = np.empty((rows.size, *self.shape[1:]), self.dtype)
        self.read(rows.reshape(-1), out)
        values = out.reshape(rows.shape + self.shape[1:])
        return values[(slice(None),) * rows.ndim + tuple(others)] if others else values

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError("rows of a file are copied when they are read")
        values = self[:]
        return values if dtype is None else values.astype(dtype)


def as_lazy_rows(array: Any) -> Any:
    """Return `LazyRows` for a read-only `np.memmap` of contiguous rows; return anything else unchanged."""
    mapping = getattr(array, "_mmap", None) if isinstance(array, np.memmap) else None
    if mapping is None or array.mode != "r" or not array.filename or not array.ndim or not array.flags.c_contiguous:
        return array
    start = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY  # position in the file at which the mapping starts
    inside = array.__array_interface__["data"][0] - np.frombuffer(mapping, np.uint8).__array_interface__["data"][0]
    file = ArrayFile(Path(array.filename).absolute(), start + inside, array.shape, array.dtype)
    return LazyRows(file, np.arange(len(array)))


def select_rows(array: Any, rows: Any) -> Any:
    """Return `array[rows]`, without reading rows that are in a file."""
    array = as_lazy_rows(array)
    return array.select(rows) if isinstance(array, LazyRows) else array[rows]
