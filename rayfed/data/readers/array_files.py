"""A reader for IDX files, and datasets of a few files with arrays, which are cached when they are first read."""

import gzip
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.paths import read_file
from rayfed.data.on_disk import cached_arrays
from rayfed.data.published import Source
from rayfed.data.readers.files import files_hash, readable

VERSION = 3  # raise it when the pixels, labels or notes change


class Arrays(NamedTuple):
    """Images uint8 [n, ...], labels int64 [n], and the mask of the dataset's test examples, bool [n].

    Arrays from files that have not changed have the same `key`.
    """

    images: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray
    key: str = ""


def read_once(name: str, source: Source, folder: Path, files: Sequence[str], read: Callable[[], Arrays]) -> Arrays:
    """Return what `read` reads from `files` in the folder of a source, read-only, and cache it under `name`.

    The files are compared with the published ones before they are read. Later, only their sizes and modification times
    are checked.
    """

    def make() -> dict[str, np.ndarray]:
        source.compare(folder, files)
        images, labels, is_test, _ = read()
        return {"images": images, "labels": labels, "is_test": is_test}

    key = files_hash(folder, files)
    arrays = cached_arrays(name, {"version": VERSION, "files": key}, make)
    return Arrays(arrays["images"], np.array(arrays["labels"]), np.array(arrays["is_test"]), key)


def validated_arrays(path: Path, images: object, labels: object, shape: tuple[int | None, ...], classes: int) -> Arrays:
    """Return `images` and `labels` of a file as `Arrays` without test examples.

    Raises:
        UsageError: Images are not uint8 [n, *shape], where None stands for any size, or labels are not n
            integers from 0 below `classes`.
    """
    with readable(path, "arrays of images and labels"):  # as with rows of uneven lengths
        pixels, numbers = np.asarray(images), np.asarray(labels).reshape(-1)
    pairs = zip(shape, pixels.shape[1:], strict=False)
    fits = pixels.ndim == 1 + len(shape) and all(expected in (None, actual) for expected, actual in pairs)
    if not fits or pixels.dtype != np.uint8:
        form = ", ".join("any" if side is None else str(side) for side in shape)
        raise UsageError(f"{path}: images are {pixels.dtype} {list(pixels.shape)}; expected uint8 [n, {form}]")
    labels_fit = numbers.dtype.kind in "iu" and np.isin(numbers, range(classes)).all()
    if len(numbers) != len(pixels) or not labels_fit:
        found = f"{len(numbers)} labels of {numbers.dtype}"
        raise UsageError(f"{path}: {found}; expected {len(pixels)} integers 0..{classes - 1}")
    return Arrays(pixels, numbers.astype(np.int64), np.zeros(len(pixels), bool))


def join_splits(train: Sequence[Arrays], test: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of training files and of test files, whose rows become the test examples."""
    images, labels = (np.concatenate([getattr(part, name) for part in (*train, *test)]) for name in Arrays._fields[:2])
    return Arrays(images, labels, np.arange(len(labels)) >= sum(len(part.labels) for part in train))


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with the given number of dimensions (3: images, 1: labels)."""
    with readable(path, f"an IDX file of {'images' if dimensions == 3 else 'labels'}"):
        content = gzip.decompress(read_file(path)) if path.suffix == ".gz" else read_file(path)
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:  # 08 stands for unsigned bytes
            raise ValueError(f"it starts with 0x{magic:08x}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
