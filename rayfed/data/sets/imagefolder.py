"""A user's own images, with one folder per class, optionally inside one folder per domain and per split."""

import os
from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute, looked_in
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Entry, folders, refuse_loose_images, walk
from rayfed.data.sets.image_folders import ImageFiles

TRAIN, TEST, VAL = {"train", "training"}, {"test", "testing"}, {"val", "valid", "validation"}
LAYOUT = "expected <class>/*, <domain>/<class>/*, or either of them in train/ beside test/ or val/"


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFiles):
    """Images in `<folder>/<class>/` or `<folder>/<domain>/<class>/`, or in either below `train` beside `test` or `val`.

    Every domain has the same classes, numbered in the order of their folders' names; images in folders below a class
    belong to it. Without domain folders, there is one domain, "images"; `domains=[images]` says so where the folders of
    classes have folders. The split is drawn (`test`), unless there are folders `train` and `test` or `val`, as
    torchvision has them: then these are the test images. With both, those of `val` are training images, of which each
    client's validation part is drawn. Folders named like splits are domains only if `domains` names them.
    """

    name: ClassVar[str] = "imagefolder"

    folder: str = option(help="folder that contains the folders of the domains, of the classes, or train and test")

    def available_domains(self) -> tuple[str, ...]:
        return self._layout()[1]

    def load(self) -> Dataset:
        """Return the images that are kept; UsageError if folders or files are missing, or do not fit the options."""
        root, (splits, available, classes) = absolute(self.folder), self._layout()
        domains, entries = self.selected_domains(), list[Entry]()
        for split, is_test in splits.items():
            if available != ("images",):
                refuse_loose_images(root / split)
            inner = domains if available != ("images",) else ("",)
            found = walk(root, {n: os.path.join(split, name) for n, name in enumerate(inner)}, classes)
            entries += [entry._replace(is_test=is_test) for entry in found]
        return self.dataset(root, entries, domains, len(classes), published="" not in splits)

    def _layout(self) -> tuple[dict[str, bool], tuple[str, ...], tuple[str, ...]]:
        """Return whether each folder of a split ("": there are none) has test images, the domains, and the classes."""
        root, where = absolute(self.folder), f"data.folder={self.folder}"
        if not root.is_dir():
            raise UsageError(f"{where}: no such folder{looked_in(self.folder)}; {LAYOUT}")
        outer = folders(root)
        names = {name.lower() for name in outer}
        tests = TEST if names & TEST else VAL
        splits = {"": False}
        if names & TRAIN and names & tests and names <= TRAIN | TEST | VAL and not set(self.domains) & set(outer):
            splits = {name: name.lower() in tests for name in outer}
            outer = folders(root / outer[0])
        inner = sorted({name for title in outer for name in folders(root / next(iter(splits)) / title)})
        domains, classes = (["images"], outer) if not inner or self.domains == ["images"] else (outer, inner)
        for name in (*domains, *classes):
            if name.lower() in TRAIN | TEST | VAL and name not in self.domains:
                remedy = f"to make the folders domains, name them with data.domains=[{','.join(outer)}]"
                raise UsageError(f"{where}: {name} is named like a split; {LAYOUT}; {remedy}")
        if not classes:
            raise UsageError(f"{where}: no images in folders; {LAYOUT}")
        return splits, tuple(domains), tuple(classes)
