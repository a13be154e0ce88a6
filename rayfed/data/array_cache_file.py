"""Cache files with one array each: written atomically, checked when opened, and memory-mapped by all readers."""

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

# Bytes per block and blocks that the checksum covers: all of a file up to 64 MiB, and 64 MiB of a larger one.
BLOCK, BLOCKS = 1 << 16, 1 << 10

Fill = Callable[[np.ndarray], None]


class CacheUnusable(Exception):
    """Raised when the cache folder cannot be written or has no room."""


def open_array(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap | None:
    """Return the array in `path`, read-only, or None if the file is missing, truncated, damaged or has another key.

    The array's bytes come first, so that they start on a page; the key and a checksum follow as JSON. For more than
    64 MiB, the checksum covers 1,024 evenly spaced blocks, which is enough to detect every truncated or half-written
    file.
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
    """Return the array in `path`, creating it with `fill` if necessary; other processes wait in the meantime.

    Raises:
        CacheUnusable: The folder cannot be written, or has no room for the array.
    """
    with _exclusive_lock(path):
        array = open_array(path, key, shape, dtype)
        if array is None:
            _write(path, key, shape, dtype, fill)
            array = open_array(path, key, shape, dtype)
    if array is None:
        raise CacheUnusable(f"{path} cannot be read back")
    return array


@contextlib.contextmanager
def _exclusive_lock(path: Path) -> Iterator[None]:
    with _os_errors_as_unusable():
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.with_name(f"{path.name.rpartition('-')[0]}.lock"))  # one lock per dataset
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _write(path: Path, key: str, shape: tuple[int, ...], dtype: np.dtype, fill: Fill) -> None:
    """Fill a file beside `path` and rename it, so that readers see a complete file or none, even after a crash."""
    # The lock is held, so any such file was left by a writer that was killed.
    for stale in path.parent.glob(f"{path.name}.*.part"):
        stale.unlink(missing_ok=True)
    size, temporary = _size(shape, dtype), path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")
    try:
        with _os_errors_as_unusable():
            _reserve(temporary, size)
        array = np.memmap(temporary, dtype, "r+", shape=shape)
        fill(array)
        with _os_errors_as_unusable():
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
    """Create a file of `size` bytes and allocate its space: writing to a page without space kills the process."""
    free = shutil.disk_usage(path.parent).free
    if size > free:
        raise CacheUnusable(f"{path.parent} has {free / 1e9:.1f} GB free")
    with open(path, "wb") as file:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
        file.truncate(max(size, 1))  # mmap needs at least one byte, even for an empty array


@contextlib.contextmanager
def _os_errors_as_unusable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheUnusable(" ".join(str(error).split())) from error


def _size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    return int(np.prod(shape, dtype=object)) * dtype.itemsize


def checksum(file: int, size: int, offset: int = 0) -> int:
    """Return the CRC-32 of `size` bytes from `offset`, or of evenly spaced blocks, including the first and the last."""
    count = -(-size // BLOCK)
    crc = 0
    for block in range(count) if count <= BLOCKS else (k * (count - 1) // (BLOCKS - 1) for k in range(BLOCKS)):
        crc = zlib.crc32(os.pread(file, min(BLOCK, size - block * BLOCK), offset + block * BLOCK), crc)
    return crc
