"""Base class of datasets of image files in several domains."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSampling
from rayfed.data.readers.class_folders import Listing
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
            ood=self.left_out,
            **self.normalisation(),
        )
