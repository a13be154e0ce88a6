"""FedBN's published lists of training and test images for Office-Caltech-10 and DomainNet."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Entry, Listing
from rayfed.data.readers.pickled import read_pickle
from rayfed.data.sets.image_domains import DomainFolders


@dataclass(frozen=True, kw_only=True)
class FedBnLists(DomainFolders):
    """Domains with a random split, or with the split in FedBN's `<domain>_train.pkl` and `<domain>_test.pkl`."""

    split: str = option("random", choices=("random", "published"), help="random split of all images, or FedBN's lists")

    def load(self) -> Dataset:
        """Return the images as `DomainFolders` does, or only those in FedBN's lists, with their split."""
        if self.split == "random":
            return super().load()
        domains = self.selected_domains()
        folder = self.dataset_folder()
        entries = [
            Entry(file, self.classes.index(title), number, part == "test")
            for number, domain in enumerate(domains)
            for part in ("train", "test")
            for file, title in read_lists(folder / f"{domain}_{part}.pkl", self.classes, self.url)
        ]
        # FedBN's paths start with the name of the dataset's folder.
        return self.dataset(Listing.of(folder.parent, entries), domains, self.count, published=True)


def read_lists(path: Path, classes: Sequence[str], url: str) -> list[tuple[str, str]]:
    """Return the files of a list, relative to the folder of datasets, and their class names."""
    expected = "a pickled pair of lists, paths and class names"
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected {expected}; from {url}")
    content = read_pickle(path, expected)
    sequences = (tuple, list, np.ndarray)
    lists = [list(part) for part in content if isinstance(part, sequences)] if isinstance(content, sequences) else []
    if len(lists) != 2 or not all(lists):
        raise UsageError(f"{path}: contains something else; expected {expected}")
    files, titles = lists
    if len(files) != len(titles):
        raise UsageError(f"{path}: {len(titles)} class names for {len(files)} paths; expected one each")
    for file, title in zip(files, titles, strict=True):
        if not isinstance(file, str) or title not in classes:
            raise UsageError(f"{path}: {file!r} has the class {title!r}; expected one of {', '.join(classes)}")
    return [(str(file), str(title)) for file, title in zip(files, titles, strict=True)]
