"""Listings of image files in folders that are named after the classes."""

import functools
import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.readers.decoding import formats
from rayfed.data.readers.files import in_words, is_hidden, note, tell_left_out

EXPECTED = "files that end in .png, .jpg or another format that Pillow reads"
MOST_TOLD = 8  # folders without a class that are named in one line


class Entry(NamedTuple):
    """One image file: path below the root, class, domain, whether it is for testing, client, whether for validation."""

    file: str
    label: int
    domain: int
    is_test: bool = False
    client: int = 0
    is_val: bool = False


def as_columns(entries: Iterable[Entry]) -> tuple[np.ndarray, ...]:
    """Return the fields of `entries` as one array [n] each, in their order."""
    columns = zip(*entries, strict=True)
    return tuple(map(np.array, columns))


@functools.cache
def endings() -> frozenset[str]:
    """Return the endings of the files that Pillow decodes, in lower case."""
    extensions = Image.registered_extensions()
    decoded = {"MPO", *formats()}
    return frozenset(ending for ending, name in extensions.items() if name in decoded)


def _ending(name: str) -> str:
    return os.path.splitext(name)[1].lower()


def folders(path: Path) -> list[str]:
    """Return the sorted names of the folders in `path`, without hidden folders."""
    entries = os.scandir(path)
    return sorted(entry.name for entry in entries if entry.is_dir() and not is_hidden(entry.name))


def refuse_loose_images(folder: Path) -> None:
    """Raise UsageError if `folder`, which contains folders of classes, contains an image itself."""
    for entry in os.scandir(folder):
        is_shown_file = entry.is_file() and not is_hidden(entry.name)
        if is_shown_file and _ending(entry.name) in endings():
            raise UsageError(f"{entry.path}: an image without a label; move it to the folder of its class")


def image_files(path: Path, left_out: Counter[str]) -> list[str]:
    """Return the sorted paths of the image files below `path`, relative to it, without hidden files.

    The other files are counted in `left_out` by their endings, except those that systems leave. A folder to which
    several links lead is read once.
    """
    found = []
    visited: set[tuple[int, int]] = set()
    for folder, inner, names in os.walk(path, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:  # folders that link to each other would have no end
            inner.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        here = os.path.realpath(folder)
        left_out.update(f"{name}/" for name in inner if name.startswith("."))
        back = set()
        for name in inner:
            link = os.path.join(folder, name)
            if os.path.islink(link) and f"{here}/".startswith(f"{os.path.realpath(link)}/"):
                back.add(name)
        kept = [name for name in inner if not is_hidden(name) and name not in back]
        inner[:] = kept  # a walk back would not end
        for name in names:
            if name.startswith("."):
                of_a_mac = name.startswith("._")  # as a Mac leaves
                left_out["hidden"] += _ending(name) in endings() and not of_a_mac
            elif _ending(name) in endings():
                image = os.path.join(folder, name)
                found.append(os.path.relpath(image, path))
            elif not is_hidden(name):
                left_out[_ending(name) or "without an ending"] += 1
    return sorted(found)


def class_names(root: Path, domains: Iterable[str], count: int) -> tuple[str, ...]:
    """Return the sorted folder names of the first domain; there must be `count` of them."""
    first = root / next(iter(domains))
    if not first.is_dir():
        return ()
    names = tuple(folders(first))
    if names and len(names) != count:
        given = f"{len(names)} class folders ({_abbreviated(names)})"
        raise UsageError(f"{first}: {given}; expected {count}")
    return names


def walk(
    root: Path,
    domains: Mapping[int, str],
    classes: Sequence[str],
    *,
    ignore_others: bool = False,
    may_lack_classes: bool = False,
) -> list[Entry]:
    """Return the images of `<root>/<domain>/<class>/` and of the folders below.

    Args:
        root: Folder of the dataset.
        domains: Number and folder of each domain ("" if the class folders are in `root` itself).
        classes: Names of the class folders, in the order of the class indices.
        ignore_others: Ignore folders of other classes instead of refusing them. Images outside of class folders are
            always refused.
        may_lack_classes: Accept missing and empty folders of classes instead of refusing them.
    """
    entries = []
    left_out = Counter[str]()
    for number, name in domains.items():
        folder = root / name
        present = []
        if folder.is_dir():
            present = folders(folder)
        absent = [title for title in classes if title not in present and not may_lack_classes]
        unknown = [title for title in present if title not in classes and not ignore_others]
        if absent or unknown:
            if absent:
                problem = f"no class folder {absent[0]}"
            else:
                problem = f"{unknown[0]} is no class"
            expected = f"{len(classes)}: {_abbreviated(classes)}"
            raise UsageError(f"{folder}: {problem}; expected {expected}")
        if present:
            refuse_loose_images(folder)
        for label, title in enumerate(classes):
            of_class = Counter[str]()
            files = image_files(folder / title, of_class)
            if not files and not may_lack_classes:
                others = ""
                if of_class.total():
                    others = f" but {in_words(of_class)}"
                raise UsageError(f"{folder / title}: contains no image{others}; expected {EXPECTED}")
            left_out += of_class
            for file in files:
                image = os.path.join(name, title, file)
                entries.append(Entry(image, label, number))
    tell_left_out(root, left_out)
    return entries


def tell_absent_classes(root: Path, held: Mapping[str, set[int]], classes: Sequence[str]) -> None:
    """Print which folders have no image of which classes, as a misspelt name is a class of its own.

    Args:
        root: Folder of the dataset.
        held: The classes of the images in each folder of a client or a domain, by its path below the root.
        classes: Names of the class folders, in the order of the class indices.

    Raises:
        UsageError: A class has no image at all, or no two folders have a class in common.
    """
    counts = Counter(itertools.chain(*held.values()))
    for label, title in enumerate(classes):
        if not counts[label]:
            raise UsageError(f"{root}: the folders of the class {title} contain no image; expected {EXPECTED}")
    if len(held) > 1 and max(counts.values()) == 1:
        first, second = list(held)[:2]
        remedy = f"if {first} and {second} are classes, give data.domains=[images]"
        raise UsageError(f"{root}: no class is in two folders, so {classes[0]} may be no class; {remedy}")
    lacking = {}
    for name in held:
        lacking[name] = [title for label, title in enumerate(classes) if label not in held[name]]
    told = []
    for name, absent in lacking.items():
        if absent:
            told.append(f"{name.rstrip('/')} has no image of {_abbreviated(absent)}")
    if told:
        more = ""
        if len(told) > MOST_TOLD:
            more = f", and {len(told) - MOST_TOLD} more folders lack some"
        first = "; ".join(told[:MOST_TOLD])
        note(f"{root}: {first}{more}")


def _abbreviated(names: Sequence[str]) -> str:
    if len(names) <= 10:
        return ", ".join(names)
    return f"{', '.join(names[:4])}, … {names[-1]}"
