"""FEMNIST and CelebA, two datasets of LEAF (Caldas et al. 2018), from the tables of the Hugging Face hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.published import Published
from rayfed.data.sets.labelled_table import HubTables


@dataclass(frozen=True, kw_only=True)
class Femnist(Published, HubTables):
    """FEMNIST (Caldas et al. 2018, "LEAF"): 814,277 grey images of 28 x 28 of 62 digits and letters by 3,597 writers.

    `<root>/FEMNIST` is a copy of flwrlabs/femnist on the Hugging Face hub: Parquet files with the columns image,
    writer_id and character. Clients are the writers; a tenth of each one's images is held out, as in LEAF. Licence: BSD
    2-clause.
    """

    label: str = option("character", help="column of the classes")
    client: str | None = option("writer_id", help="column of the clients")

    name: ClassVar[str] = "femnist"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.1}

    @property
    def tables_folder(self) -> Path:
        return self.find("femnist")


@dataclass(frozen=True, kw_only=True)
class CelebA(Published, HubTables):
    """CelebA (Liu et al. 2015) as in LEAF: who smiles, on 200,288 images of 9,343 celebrities, who are the clients.

    `<root>/CelebA` is a copy of flwrlabs/celeba on the Hugging Face hub: Parquet files with the columns image, celeb_id
    and 40 attributes, of which `label` chooses one. A tenth of each celebrity's images is held out: CelebA's own splits
    consist of other people. For non-commercial research only.
    """

    label: str = option("Smiling", help="attribute to predict")
    client: str | None = option("celeb_id", help="column of the clients")
    size: int | None = option(84, low=8, help="side to resize images to; null: 178 x 218 as published")
    min_images: int = option(5, low=2, help="celebrities with fewer images are left out; LEAF: 5")

    name: ClassVar[str] = "celeba"
    partition_defaults: ClassVar[dict[str, Any]] = {"test": 0.1}

    @property
    def tables_folder(self) -> Path:
        return self.find("celeba")

    def remaining_rows(self, client: np.ndarray, path: Path) -> np.ndarray:
        """Return the rows of celebrities with `min_images` or more, without those of `drop_clients`."""
        rows = super().remaining_rows(client, path)
        _, position, counts = np.unique(client, return_inverse=True, return_counts=True)
        return rows[counts[position[rows]] >= self.min_images]
