"""One array of an .npz file, read a piece at a time."""

import contextlib
import math
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

CHUNK_BYTES = 1 << 24  # bytes that are read at a time


class ArrayHeader(NamedTuple):
    """What the header of an array says."""

    shape: tuple[int, ...]
    fortran: bool
    dtype: np.dtype


def read_header(path: Path, name: str) -> ArrayHeader:
    """The form of the array `name`; raises as `pieces`, where the file does not hold as much as its header says."""
    with _opened(path, name) as (_, found):
        return found


def read_chunks(path: Path, name: str) -> Iterator[np.ndarray]:
    """The array `name`, some rows at a time; one in Fortran's order, whose rows lie apart, comes whole.

    Raises:
        OSError, ValueError, KeyError, zipfile.BadZipFile, zlib.error: a damaged file.
    """
    with _opened(path, name) as (file, (shape, fortran, dtype)):
        if fortran and len(shape) > 1:
            yield np.frombuffer(_exactly(file, math.prod(shape) * dtype.itemsize), dtype).reshape(shape, order="F")
            return
        width = math.prod(shape[1:]) * dtype.itemsize
        step = max(1, CHUNK_BYTES // max(1, width))
        for start in range(0, shape[0], step):
            count = min(step, shape[0] - start)
            yield np.frombuffer(_exactly(file, count * width), dtype).reshape(count, *shape[1:])


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[tuple[IO[bytes], ArrayHeader]]:
    with zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        found = ArrayHeader(*headers[version](file))
        if found.dtype.hasobject:
            raise ValueError("it holds Python objects")
        size = math.prod(found.shape) * found.dtype.itemsize
        held = archive.getinfo(f"{name}.npy").file_size - file.tell()
        if held != size:
            raise ValueError(f"{held} bytes where its header says {size}")
        yield file, found


def _exactly(file: IO[bytes], size: int) -> bytes:
    found = file.read(size)
    if len(found) < size:
        raise ValueError("it ends early")
    return found
