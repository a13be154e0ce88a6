"""Image files as one array, decoded once into the cache."""

import hashlib
import os
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.status_line import StatusLine
from rayfed.data.cache import memory_mapped

VERSION = 1  # raise it when the pixels change
BLOCK = 64  # files that a thread takes at a time

# What Pillow raises on a file that it cannot make sense of.
UNREADABLE = (
    OSError, SyntaxError, ValueError, EOFError, TypeError, IndexError, KeyError, OverflowError,
    struct.error, zlib.error, Image.DecompressionBombError,
)  # fmt: skip


def decode_images(name: str, root: Path, files: Sequence[str], size: int) -> np.ndarray:
    """uint8 [n, 3, size, size], read-only: `files` below `root`, in colour, shrunk or enlarged to a square (bilinear).

    Made once for the same folder, names, sizes and times of change; later only these are looked at.

    Raises:
        UsageError: a file that is missing, empty, cut short, damaged or no image.
    """
    key = {"version": VERSION, "files": files_hash(root, files)}
    return memory_mapped(name, key, (len(files), 3, size, size), "uint8", lambda out: _fill(out, name, root, files))


def files_hash(root: Path, files: Sequence[str]) -> str:
    """A sha256 over `root` and the name, the size and the time of change of each file below it.

    The folder counts, as a copy of a folder with other pixels may have the same names, sizes and times.
    """
    found = hashlib.sha256(f"{root.resolve()}\0".encode())
    for file in files:
        try:
            status = os.stat(root / file)
        except OSError as error:
            raise UsageError(f"{root / file}: cannot be opened ({error.strerror}), though it is listed") from error
        found.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return found.hexdigest()


def _fill(out: np.ndarray, name: str, root: Path, files: Sequence[str]) -> None:
    def one(row: int) -> None:
        out[row] = resize_image(open_image(root / files[row]), out.shape[-1])

    run_in_threads(one, len(files), f"{name}: images decoded, once")


def run_in_threads(work: Callable[[int], None], count: int, what: str) -> None:
    """`work(0)` to `work(count - 1)` in threads, with a line on the terminal; the first error in that order is raised.

    Threads suffice, as Pillow lets go of the interpreter while it decodes and resizes.
    """

    def block(start: int) -> int:
        for row in range(start, min(start + BLOCK, count)):
            work(row)
        return min(start + BLOCK, count)

    with ThreadPoolExecutor(os.cpu_count()) as pool, StatusLine() as status:
        for done in pool.map(block, range(0, count, BLOCK)):
            status.show(f"{what}: {done:,} of {count:,}")


def open_image(path: Path) -> Image.Image:
    """An image file, in colour."""
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise UsageError(
            f"{path}: missing, empty, cut short, damaged or no image ({reason}); fetch it again"
        ) from error


def resize_image(image: Image.Image, size: int) -> np.ndarray:
    """uint8 [3, size, size] of an RGB image, shrunk or enlarged to a square (bilinear)."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)
