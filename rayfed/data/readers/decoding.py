"""Image files as one array, decoded once into the cache."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.status_line import StatusLine
from rayfed.data.cache import memory_mapped
from rayfed.data.readers.files import files_hash, readable

VERSION = 1  # raise it when the pixels change
BLOCK = 64  # files per task of a thread

DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")
"""Pillow's modes with more than 8 bits per pixel."""


def decode_images(name: str, root: Path, files: Sequence[str], size: int) -> np.ndarray:
    """Decode `files` below `root` to RGB and resize them bilinearly to squares: uint8 [n, 3, size, size], read-only.

    The array is cached; later, only the folder and the files' names, sizes and modification times are checked.

    Raises:
        UsageError: A file is missing, empty, truncated, damaged or not an image.
    """
    key = {"version": VERSION, "files": files_hash(root, files)}
    return memory_mapped(name, key, (len(files), 3, size, size), "uint8", lambda out: _fill(out, name, root, files))


def _fill(out: np.ndarray, name: str, root: Path, files: Sequence[str]) -> None:
    def decode(row: int) -> None:
        out[row] = resize_image(open_image(root / files[row]), out.shape[-1])

    run_in_threads(decode, len(files), f"{name}: decoding images (only once)")


def run_in_threads(work: Callable[[int], None], count: int, what: str) -> None:
    """Call `work(0)` to `work(count - 1)` in threads, with a status line; raise the first error in that order.

    Threads suffice, as Pillow releases the interpreter lock while it decodes and resizes.
    """

    def block(start: int) -> int:
        for row in range(start, min(start + BLOCK, count)):
            work(row)
        return min(start + BLOCK, count)

    with ThreadPoolExecutor(os.cpu_count()) as pool, StatusLine() as status:
        for done in pool.map(block, range(0, count, BLOCK)):
            status.show(f"{what}: {done:,} of {count:,}")


def check_depth(image: Image.Image, where: str) -> None:
    """Raise UsageError if pixels are lost in 8 bits per channel, to which Pillow cuts them off: above 255 is white."""
    if image.mode not in DEEP:
        return
    pixels = np.asarray(image)
    if not ((pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))).all():
        raise UsageError(
            f"{where}: its pixels are {pixels.dtype} from {pixels.min():g} to {pixels.max():g}; an image has integers "
            "from 0 to 255, so scale and save these with 8 bits first"
        )


def open_image(path: Path) -> Image.Image:
    """Open an image file as RGB.

    Raises:
        UsageError: The file cannot be decoded, or has pixels that are no bytes.
    """
    with readable(path, "an image"), Image.open(path) as image:
        image.load()
        check_depth(image, str(path))
        return image.convert("RGB")


def resize_image(image: Image.Image, size: int) -> np.ndarray:
    """Resize an RGB image bilinearly to a square: uint8 [3, size, size]."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)
