"""Datasets that come as a few files of arrays: their pixels are put into the cache once."""

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
    """Images uint8 [n, ...], labels int64 [n], and which are the dataset's test examples [n]."""

    images: np.ndarray
    labels: np.ndarray
    is_test: np.ndarray


class ArrayFiles:
    """Files below `root` and how they are read; they are read once, later only their sizes and times are looked at."""

    def __init__(
        self,
        name: str,
        root: Path,
        files: Sequence[str],
        read: Callable[[], Arrays],
        also: str = "",
        published: str | None = None,
    ) -> None:
        """`also` stands for what the arrays depend on beside the files.

        `published` names torchvision's class of the dataset, with whose checksums the files are compared when read.
        """
        self.name = name
        self.key = {"version": VERSION, "files": files_hash(root, files), "also": also}
        self.read = functools.cache(read)
        self._paths, self._published = [root / file for file in files], published
        facts = cached_arrays(f"{name}-labels", self.key, lambda: dict(zip(FACTS, self._facts(), strict=True)))
        self.labels, self.is_test = facts["labels"], facts["is_test"]
        self.shape: tuple[int, ...] = tuple(facts["shape"].tolist())

    def _facts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        found = self.read()
        if self._published:
            checksums.compare(self._paths, self._published)
        return found.labels, found.is_test, np.array(found.images.shape)

    def images(self) -> np.ndarray:
        """All images, read-only."""

        def fill(out: np.ndarray) -> None:
            out[:] = self.read().images

        return memory_mapped(self.name, self.key, self.shape, "uint8", fill)


FACTS = ("labels", "is_test", "shape")


def validated_arrays(path: Path, images: object, labels: object, shape: tuple[int | None, ...], classes: int) -> Arrays:
    """`images` and `labels` of a file, none of them test examples.

    Raises:
        UsageError: images that are not uint8 [n, *shape] (None: any size), labels that are not n whole numbers below
            `classes`, or n = 0.
    """
    try:
        pixels, numbers = np.asarray(images), np.asarray(labels).reshape(-1)
    except ValueError as error:
        raise UsageError(f"{path}: images or labels of uneven lengths ({error})") from error
    fits = pixels.ndim == 1 + len(shape) and all(
        wanted in (None, found) for wanted, found in zip(shape, pixels.shape[1:], strict=False)
    )
    if not fits or pixels.dtype != np.uint8:
        wanted = ", ".join("any" if side is None else str(side) for side in shape)
        raise UsageError(f"{path}: images are {pixels.dtype} {list(pixels.shape)}; expected uint8 [n, {wanted}]")
    if not len(pixels) or len(numbers) != len(pixels):
        raise UsageError(f"{path}: {len(numbers)} labels for {len(pixels)} images; expected one each, at least one")
    whole = numbers.dtype.kind in "iu"
    if not whole or numbers.min() < 0 or numbers.max() >= classes:
        found = f"{numbers.min()}..{numbers.max()}" if whole else numbers.dtype
        raise UsageError(f"{path}: labels are {found}; expected whole numbers 0..{classes - 1}")
    return Arrays(pixels, numbers.astype(np.int64), np.zeros(len(pixels), bool))


def join_splits(train: Sequence[Arrays], test: Sequence[Arrays]) -> Arrays:
    """Training files, then test files."""
    images, labels = (np.concatenate([getattr(part, name) for part in (*train, *test)]) for name in Arrays._fields[:2])
    return Arrays(images, labels, np.arange(len(labels)) >= sum(len(part.labels) for part in train))
