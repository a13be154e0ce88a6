"""Datasets of image files in several domains, a folder a domain and in it a folder a class."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSampling
from rayfed.data.readers.class_folders import Listing, classes_of, walk
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.decoding import decode_images


@dataclass(frozen=True, kw_only=True)
class ImageFiles(DomainSampling):
    """Image files in domains; only those that are kept are decoded."""

    default_partition: ClassVar[str] = "domains"

    size: int = option(64, low=8, help="side of the images, to which they are shrunk or enlarged")
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
        """The images of `listing` that are kept.

        Its test images are the dataset's if `published`, else they are drawn; its clients are the dataset's if
        `natural`. `source` is the domain, `index` the place of an image in the listing of its domain.
        """
        own = {name: np.flatnonzero(listing.domain == number) for number, name in enumerate(domains)}
        sizes = {name: len(rows) for name, rows in own.items()}
        flags = {name: listing.is_test[rows] for name, rows in own.items()} if published else None
        kept = self.sample(sizes, flags)
        rows = np.concatenate([own[name][part.rows] for name, part in kept.items()])
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
    """`<root>/<one of places>/<domain>/<class>/*.jpg`; the split into training and test images is drawn."""

    places: ClassVar[tuple[str, ...]]
    folders: ClassVar[dict[str, tuple[str, ...]]]  # of each domain, in the spellings that are about
    classes: ClassVar[tuple[str, ...]] = ()  # () where the folders say them
    count: ClassVar[int]
    url: ClassVar[str]
    others: ClassVar[bool] = False  # whether folders of further classes may lie beside them

    root: str | None = option(None, help=ROOT_HELP)

    def available_domains(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def load(self) -> Dataset:
        """The images that are kept of the chosen domains, one domain after the other.

        Raises:
            UsageError: folders or files that are missing, empty or damaged, or an option that does not fit them.
        """
        domains = self.selected_domains()
        folder = self.place()
        inside = {number: self.spelling(folder, name) for number, name in enumerate(domains)}
        classes = self.classes or classes_of(folder, inside.values(), self.count)
        listing = Listing.of(folder, walk(folder, inside, classes, only=self.others))
        return self.dataset(listing, domains, self.count)

    def place(self) -> Path:
        """The folder of the dataset."""
        names = ", ".join(found[0] for found in self.folders.values())
        expected = f"the folders {names}, each with {self.count} class folders of images"
        return find_dataset_folder(self.root, self.places, expected=expected, source=self.url)

    def spelling(self, folder: Path, domain: str) -> str:
        """The folder of a domain: the first spelling that is there."""
        known = self.folders[domain]
        return next((name for name in known if (folder / name).is_dir()), known[0])
