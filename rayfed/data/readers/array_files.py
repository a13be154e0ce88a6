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
    labels = np.array(arrays["labels"])
    is_test = np.array(arrays["is_test"])
    return Arrays(arrays["images"], labels, is_test, key)


def validated_arrays(path: Path, images: object, labels: object, shape: tuple[int | None, ...], classes: int) -> Arrays:
    """Return `images` and `labels` of a file as `Arrays` without test examples.

    Raises:
        UsageError: Images are not uint8 [n, *shape], where None stands for any size, or labels are not n
            integers from 0 below `classes`.
    """
    with readable(path, "arrays of images and labels"):  # as with rows of uneven lengths
        pixels = np.asarray(images)
        numbers = np.asarray(labels).reshape(-1)
    pairs = zip(shape, pixels.shape[1:], strict=False)
    fits = pixels.ndim == 1 + len(shape)
    fits = fits and all(expected in (None, actual) for expected, actual in pairs)
    if not fits or pixels.dtype != np.uint8:
        sides = []
        for side in shape:
            if side is None:
                sides.append("any")
            else:
                sides.append(str(side))
        form = ", ".join(sides)
        found = f"{pixels.dtype} {list(pixels.shape)}"
        raise UsageError(f"{path}: images are {found}; expected uint8 [n, {form}]")
    are_integers = numbers.dtype.kind in "iu"
    labels_fit = are_integers and np.isin(numbers, range(classes)).all()
    if len(numbers) != len(pixels) or not labels_fit:
        found = f"{len(numbers)} labels of {numbers.dtype}"
        expected = f"{len(pixels)} integers 0..{classes - 1}"
        raise UsageError(f"{path}: {found}; expected {expected}")
    is_test = np.zeros(len(pixels), bool)
    return Arrays(pixels, numbers.astype(np.int64), is_test)


def join_splits(train: Sequence[Arrays], test: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of training files and of test files; the rows of the latter become the test examples."""
    parts = [*train, *test]
    images = np.concatenate([part.images for part in parts])
    labels = np.concatenate([part.labels for part in parts])
    count = sum(len(part.labels) for part in train)
    is_test = np.arange(len(labels)) >= count
    return Arrays(images, labels, is_test)


def read_idx(path: Path, *, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with the given number of dimensions (3: images, 1: labels)."""
    what = "labels"
    if dimensions == 3:
        what = "images"
    with readable(path, f"an IDX file of {what}"):
        if path.suffix == ".gz":
            content = gzip.decompress(read_file(path))
        else:
            content = read_file(path)
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:  # 08 stands for unsigned bytes
            raise ValueError(f"it starts with 0x{magic:08x}")
        flat = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
        return flat.reshape(shape)
