"""Datasets that consist of a few files with arrays, whose pixels are written to the cache once."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.cache import cached_arrays, memory_mapped
from rayfed.data.readers import checksums
from rayfed.data.readers.decoding import files_hash

VERSION = 1  # raise it when the pixels or labels change


class Arrays(NamedTuple):
    """Images uint8 [n, ...], labels int64 [n], and the mask of the dataset's test examples, bool [n]."""

    images: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray


class ArrayFiles:
    """Files below `root` that are read once; later, only their sizes and modification times are checked."""

    def __init__(
        self,
        name: str,
        root: Path,
        files: Sequence[str],
        read: Callable[[], Arrays],
        also: str = "",
        published: str | None = None,
    ) -> None:
        """Read labels and shape, from the cache if it has them.

        Args:
            name: Prefix of the cache files' names.
            root: Folder of the files.
            files: Paths of the files below `root`.
            read: Reads the files.
            also: Anything else that the arrays depend on.
            published: Torchvision's class of the dataset, with whose checksums the files are compared when read.
        """
        self.name = name
        self.key = {"version": VERSION, "files": files_hash(root, files), "also": also}
        self.read = functools.cache(read)
        self._paths, self._published = [root / file for file in files], published
        cached = cached_arrays(f"{name}-labels", self.key, self._labels_and_shape)
        self.labels, self.is_test = cached["labels"], cached["is_test"]
        self.shape: tuple[int, ...] = tuple(cached["shape"].tolist())

    def _labels_and_shape(self) -> dict[str, np.ndarray]:
        arrays = self.read()
        if self._published:
            checksums.compare(self._paths, self._published)
        return {"labels": arrays.labels, "is_test": arrays.is_test, "shape": np.array(arrays.images.shape)}

    def images(self) -> np.ndarray:
        """Return all images, read-only."""

        def fill(out: np.ndarray) -> None:
            out[:] = self.read().images

        return memory_mapped(self.name, self.key, self.shape, "uint8", fill)


def validated_arrays(path: Path, images: object, labels: object, shape: tuple[int | None, ...], classes: int) -> Arrays:
    """Return `images` and `labels` of a file as `Arrays` without test examples.

    Args:
        path: The file, for error messages.
        images: Expected to be uint8 [n, *shape], with n > 0.
        labels: Expected to be n integers from 0 below `classes`.
        shape: Expected shape of an image; None: any size.
        classes: Number of classes.

    Raises:
        UsageError: The images or labels are not as expected.
    """
    try:
        pixels, numbers = np.asarray(images), np.asarray(labels).reshape(-1)
    except ValueError as error:
        raise UsageError(f"{path}: images or labels of uneven lengths ({error})") from error
    fits = pixels.ndim == 1 + len(shape) and all(
        expected in (None, actual) for expected, actual in zip(shape, pixels.shape[1:], strict=False)
    )
    if not fits or pixels.dtype != np.uint8:
        form = ", ".join("any" if side is None else str(side) for side in shape)
        raise UsageError(f"{path}: images are {pixels.dtype} {list(pixels.shape)}; expected uint8 [n, {form}]")
    if not len(pixels) or len(numbers) != len(pixels):
        raise UsageError(f"{path}: {len(numbers)} labels for {len(pixels)} images; expected one each, at least one")
    are_integers = numbers.dtype.kind in "iu"
    if not are_integers or numbers.min() < 0 or numbers.max() >= classes:
        actual = f"{numbers.min()}..{numbers.max()}" if are_integers else numbers.dtype
        raise UsageError(f"{path}: labels are {actual}; expected integers 0..{classes - 1}")
    return Arrays(pixels, numbers.astype(np.int64), np.zeros(len(pixels), bool))


def join_splits(train: Sequence[Arrays], test: Sequence[Arrays]) -> Arrays:
    """Concatenate the arrays of training files and then of test files, marking the latter as test examples."""
    images, labels = (np.concatenate([getattr(part, name) for part in (*train, *test)]) for name in Arrays._fields[:2])
    return Arrays(images, labels, np.arange(len(labels)) >= sum(len(part.labels) for part in train))
