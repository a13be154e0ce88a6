"""Listings of image files in folders that are named after the classes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.dataset import index_within_group

ENDINGS = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff")


class Entry(NamedTuple):
    """One image file: path below the root, class, domain, whether it is a test image, and client."""

    file: str
    label: int
    domain: int
    is_test: bool = False
    client: int = 0


@dataclass(frozen=True)
class Listing:
    """The n image files of a dataset; `index` is the position of each in the listing of its domain."""

    root: Path
    files: np.ndarray
    labels: np.ndarray
    domain: np.ndarray
    is_test: np.ndarray
    client: np.ndarray
    index: np.ndarray

    @classmethod
    def of(cls, root: Path, entries: Sequence[Entry]) -> "Listing":
        """Return the listing of `entries`; raise UsageError if it is empty or a training image is also a test image."""
        if not entries:
            raise UsageError(f"{root}: no image is listed; expected at least one per class")
        files, labels, domain, is_test, client = (np.array(column) for column in zip(*entries, strict=True))
        in_both = np.intersect1d(files[is_test], files[~is_test])
        if len(in_both):
            raise UsageError(f"{root / in_both[0]}: listed for both training and testing; expected one of them")
        return cls(root, files, labels.astype(np.int64), domain, is_test, client, index_within_group(domain))


def folders(path: Path) -> list[str]:
    """Return the sorted names of the folders in `path`, without hidden ones."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def image_files(path: Path) -> list[str]:
    """Return the sorted names of the image files in `path`, without hidden ones."""
    names = (entry.name for entry in os.scandir(path) if entry.name.lower().endswith(ENDINGS))
    return sorted(name for name in names if not name.startswith("."))


def class_names(root: Path, domains: Iterable[str], count: int) -> tuple[str, ...]:
    """Return the sorted folder names of the first domain; there must be `count` of them."""
    first = root / next(iter(domains))
    names = tuple(folders(first)) if first.is_dir() else ()
    if names and len(names) != count:
        raise UsageError(f"{first}: {len(names)} class folders ({_abbreviated(names)}); expected {count}")
    return names


def walk(root: Path, domains: Mapping[int, str], classes: Sequence[str], *, ignore_others: bool = False) -> list[Entry]:
    """Return the images of `<root>/<domain>/<class>/`.

    Args:
        root: Folder of the dataset.
        domains: Number and folder of each domain ("" if the class folders are in `root` itself).
        classes: Names of the class folders, in the order of the class indices.
        ignore_others: Ignore folders of other classes instead of refusing them.

    Raises:
        UsageError: A folder is missing, empty or not one of `classes`, or an image is in no class folder.
    """
    entries = []
    for number, name in domains.items():
        folder = root / name
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; expected the class folders {_abbreviated(classes)}")
        present, stray = folders(folder), image_files(folder)
        missing = [label for label in classes if label not in present]
        unknown = [label for label in present if label not in classes]
        if missing:
            raise UsageError(
                f"{folder}: no class folder {missing[0]}; expected {len(classes)}: {_abbreviated(classes)}"
            )
        if unknown and not ignore_others:
            raise UsageError(f"{folder / unknown[0]}: not one of the {len(classes)} classes: {_abbreviated(classes)}")
        if stray:
            raise UsageError(f"{folder / stray[0]}: an image without a label; move it to the folder of its class")
        for label, title in enumerate(classes):
            files = image_files(folder / title)
            if not files:
                raise UsageError(f"{folder / title}: contains no image; expected {', '.join(ENDINGS)}")
            entries += [Entry(os.path.join(name, title, file), label, number) for file in files]
    return entries


def _abbreviated(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:4])}, … {names[-1]}"
