"""Files that hold one array each: whole or not there, checked when opened, and mapped by all who read them."""

import contextlib
import json
import os
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from filelock import FileLock

BLOCK, BLOCKS = 1 << 16, 1 << 10  # what is checked when a file is opened: all of it up to 64 MiB, else as much of it

Fill = Callable[[np.ndarray], None]


class CacheUnusable(Exception):
    """The folder cannot be written, or has no room."""


def open_array(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap | None:
    """The array in `path`, read-only; None where the file is missing, cut short, damaged, or of another key.

    The array's bytes come first, so that they begin on a page; after them, as JSON, the key and a checksum. Of more
    than 64 MiB the checksum covers 1,024 blocks, evenly spread: a file that was cut or half written never passes.
    """
    size = _size(shape, dtype)
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size <= size:
                return None
            file.seek(size)
            if json.loads(file.read()) != {"key": key, "crc": checksum(file.fileno(), size)}:
                return None
        return np.memmap(path, dtype, "r", shape=shape)
    except (OSError, ValueError):
        return None


def open_or_create_array(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> np.memmap:
    """As `opened`, filling the array first if need be; meanwhile, others that want the same file wait.

    Raises:
        CacheUnusable: the folder cannot be written, or has no room for the array.
    """
    with _alone(path):
        found = open_array(path, key, shape, dtype)
        if found is None:
            _write(path, key, shape, dtype, fill)
            found = open_array(path, key, shape, dtype)
    if found is None:
        raise CacheUnusable(f"{path} cannot be read back")
    return found


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    with _reported():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name.rpartition('-')[0]}.lock"))  # one for all arrays of a dataset
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> None:
    """Fills a file beside `path` and renames it, so that a reader sees a whole file or none, also after a crash."""
    for left in path.parent.glob(f"{path.name}.*.part"):  # of a writer that was killed: this one is alone
        left.unlink(missing_ok=True)
    size, temporary = _size(shape, dtype), path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        with _reported():
            _reserve(temporary, size)
        array = np.memmap(temporary, dtype, "r+", shape=shape)
        fill(array)
        with _reported():
            array.flush()
            with open(temporary, "r+b") as file:
                file.seek(size)
                file.write(json.dumps({"key": key, "crc": checksum(file.fileno(), size)}).encode())
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _reserve(path: Path, size: int) -> None:
    """A file of `size` bytes whose room on the disk is its own: a page without room would kill whoever fills it."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise CacheUnusable(f"{path.parent} has {free / 1e9:.1f} GB free")
    with open(path, "wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(max(size, 1))  # of an empty array, too, there must be something to map


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheUnusable(" ".join(str(error).split())) from error


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def checksum(file: int, size: int, offset: int = 0) -> int:
    """CRC-32 of `size` bytes from `offset`, or of blocks spread evenly over them, the first and the last included."""
    count = -(-size // BLOCK)
    crc = 0
    for block in range(count) if count <= BLOCKS else (k * (count - 1) // (BLOCKS - 1) for k in range(BLOCKS)):
        crc = zlib.crc32(os.pread(file, min(BLOCK, size - block * BLOCK), offset + block * BLOCK), crc)
    return crc
