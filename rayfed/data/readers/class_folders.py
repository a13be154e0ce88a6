"""Listings of image files, from folders whose names are the classes."""

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
    """One image file: its path below the root, its class and its domain, and whether it is a test image."""

    file: str
    label: int
    domain: int
    is_test: bool = False
    client: int = 0


@dataclass(frozen=True)
class Listing:
    """The n image files of a dataset; `index` is the place of each in the listing of its domain."""

    root: Path
    files: np.ndarray
    labels: np.ndarray
    domain: np.ndarray
    is_test: np.ndarray
    client: np.ndarray
    index: np.ndarray

    @classmethod
    def of(cls, root: Path, entries: Sequence[Entry]) -> "Listing":
        """Raises `UsageError` where there is no entry, or where a training image is a test image too."""
        if not entries:
            raise UsageError(f"{root}: lists no image; expected at least one per class")
        files, labels, domain, is_test, client = (np.array(column) for column in zip(*entries, strict=True))
        both = np.intersect1d(files[is_test], files[~is_test])
        if len(both):
            raise UsageError(f"{root / both[0]}: listed for training and for testing; expected one of them")
        return cls(root, files, labels.astype(np.int64), domain, is_test, client, index_within_group(domain))


def folders(path: Path) -> list[str]:
    """The names of the folders in `path`, in order, hidden ones left out."""
    return sorted(entry.name for entry in os.scandir(path) if entry.is_dir() and not entry.name.startswith("."))


def image_files(path: Path) -> list[str]:
    """The names of the image files in `path`, in order, hidden ones left out."""
    names = (entry.name for entry in os.scandir(path) if entry.name.lower().endswith(ENDINGS))
    return sorted(name for name in names if not name.startswith("."))


def classes_of(root: Path, domains: Iterable[str], count: int) -> tuple[str, ...]:
    """The folder names of the first domain, in order; there must be `count` of them."""
    first = root / next(iter(domains))
    found = tuple(folders(first)) if first.is_dir() else ()
    if found and len(found) != count:
        raise UsageError(f"{first}: {len(found)} class folders ({_few(found)}); expected {count}")
    return found


def walk(root: Path, domains: Mapping[int, str], classes: Sequence[str], *, only: bool = False) -> list[Entry]:
    """The images of `<root>/<domain>/<class>/`, where `domains` gives each domain's number and folder ("" for none).

    `only`: other class folders may lie beside those of `classes` and are passed over.

    Raises:
        UsageError: a folder that is missing, is of no class or has no image; images that lie in no class folder.
    """
    entries = []
    for number, name in domains.items():
        folder = root / name
        if not folder.is_dir():
            raise UsageError(f"{folder}: no such folder; expected one with the class folders {_few(classes)}")
        found, stray = folders(folder), image_files(folder)
        missing = [label for label in classes if label not in found]
        unknown = [label for label in found if label not in classes]
        if missing:
            raise UsageError(f"{folder}: no class folder {missing[0]}; expected {len(classes)}: {_few(classes)}")
        if unknown and not only:
            raise UsageError(f"{folder / unknown[0]}: not one of the {len(classes)} classes: {_few(classes)}")
        if stray:
            raise UsageError(f"{folder / stray[0]}: an image without a label; expected it in the folder of its class")
        for label, title in enumerate(classes):
            files = image_files(folder / title)
            if not files:
                raise UsageError(f"{folder / title}: no image in it; expected {', '.join(ENDINGS)}")
            entries += [Entry(os.path.join(name, title, file), label, number) for file in files]
    return entries


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 10 else f"{', '.join(names[:4])}, … {names[-1]}"
