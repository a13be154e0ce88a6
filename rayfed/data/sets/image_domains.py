"""Base classes of datasets of image files in several domains, usually with one folder per domain and class."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSampling
from rayfed.data.readers.class_folders import Listing, class_names, walk
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.decoding import decode_images


@dataclass(frozen=True, kw_only=True)
class ImageFiles(DomainSampling):
    """Image files in domains; only those that are kept are decoded."""

    default_partition: ClassVar[str] = "domains"

    size: int = option(64, low=8, help="side to which images are resized")
    mean: list[float] = option([0.0], help="subtracted from images in [0, 1]; one number or three")
    std: list[float] = option([1.0], above=0, help="images are divided by it; one number or three")

    def dataset(
        self,
        listing: Listing,
        domains: tuple[str, ...],
        num_classes: int,
        *,
        published: bool = False,
        natural: bool = False,
    ) -> Dataset:
        """Return the images of `listing` that are kept.

        `source` is the domain, `index` the position of an image in the listing of its domain.

        Args:
            listing: The image files.
            domains: Names of the domains.
            num_classes: Number of classes.
            published: Use the test images of `listing`; otherwise they are drawn.
            natural: Use the clients of `listing`.
        """
        rows_of = {name: np.flatnonzero(listing.domain == number) for number, name in enumerate(domains)}
        sizes = {name: len(rows) for name, rows in rows_of.items()}
        is_test = {name: listing.is_test[rows] for name, rows in rows_of.items()} if published else None
        kept = self.sample(sizes, is_test)
        rows = np.concatenate([rows_of[name][part.rows] for name, part in kept.items()])
        return Dataset.of(
            self.name,
            decode_images(self.name, listing.root, listing.files[rows].tolist(), self.size),
            listing.labels[rows],
            is_test=np.concatenate([part.is_test for part in kept.values()]),
            num_classes=num_classes,
            domain=listing.domain[rows],
            domains=domains,
            source=listing.domain[rows],
            sources=domains,
            index=listing.index[rows],
            client=listing.client[rows] if natural else None,
            ood=tuple(self.held_out),
            **self.normalisation(),
        )


@dataclass(frozen=True, kw_only=True)
class DomainFolders(ImageFiles):
    """Images in `<root>/<one of dataset_folders>/<domain>/<class>/*.jpg`; the split is random."""

    dataset_folders: ClassVar[tuple[str, ...]]
    folders: ClassVar[dict[str, tuple[str, ...]]]  # of each domain, in all common spellings
    classes: ClassVar[tuple[str, ...]] = ()  # (): the names of the folders
    count: ClassVar[int]
    url: ClassVar[str]
    ignore_others: ClassVar[bool] = False  # whether there may be folders of other classes

    root: str | None = option(None, help=ROOT_HELP)

    def available_domains(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def load(self) -> Dataset:
        """Return the images that are kept of the selected domains, one domain after the other.

        Raises:
            UsageError: Folders or files are missing, empty or damaged, or an option does not match them.
        """
        domains = self.selected_domains()
        folder = self.dataset_folder()
        domain_folders = {number: self.domain_folder(folder, name) for number, name in enumerate(domains)}
        classes = self.classes or class_names(folder, domain_folders.values(), self.count)
        listing = Listing.of(folder, walk(folder, domain_folders, classes, ignore_others=self.ignore_others))
        return self.dataset(listing, domains, self.count)

    def dataset_folder(self) -> Path:
        """Return the folder of the dataset."""
        names = ", ".join(spellings[0] for spellings in self.folders.values())
        expected = f"the folders {names}, each with {self.count} class folders of images"
        return find_dataset_folder(self.root, self.dataset_folders, expected=expected, source=self.url)

    def domain_folder(self, folder: Path, domain: str) -> str:
        """Return the name of a domain's folder: the first spelling that exists."""
        spellings = self.folders[domain]
        return next((name for name in spellings if (folder / name).is_dir()), spellings[0])
