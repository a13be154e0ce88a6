"""One array of an .npz file, read in chunks."""

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

CHUNK_BYTES = 1 << 24  # bytes read at a time


class ArrayHeader(NamedTuple):
    """The header of an array in an .npz file."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype


def read_header(path: Path, name: str) -> ArrayHeader:
    """Return the header of the array `name`; errors are those of `read_chunks`."""
    with _opened(path, name) as (_, header):
        return header


def read_chunks(path: Path, name: str) -> Iterator[np.ndarray]:
    """Yield the array `name`, some rows at a time; an array in Fortran order is yielded as one chunk.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error: The file is damaged, or its size differs from
            the header's.
    """
    with _opened(path, name) as (file, (shape, fortran, dtype)):
        if fortran and len(shape) > 1:
            yield np.frombuffer(_read_exactly(file, math.prod(shape) * dtype.itemsize), dtype).reshape(shape, order="F")
            return
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, row_bytes))
        for start in range(0, shape[0], step):
            count = min(step, shape[0] - start)
            yield np.frombuffer(_read_exactly(file, count * row_bytes), dtype).reshape(count, *shape[1:])


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[IO[bytes], ArrayHeader]]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        header = ArrayHeader(*headers[version](file))
        if header.dtype.hasobject:
            raise ValueError("it contains Python objects")
        size = math.prod(header.shape) * header.dtype.itemsize
        actual = archive.getinfo(f"{name}.npy").file_size - file.tell()
        if actual != size:
            raise ValueError(f"{actual} bytes, but its header says {size}")
        yield file, header


def _read_exactly(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) < size:
        raise ValueError("it ends early")
    return content
