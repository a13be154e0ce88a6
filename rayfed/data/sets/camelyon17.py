"""Camelyon17-WILDS: tumours in tissue patches from five hospitals."""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Entry, Listing
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.wilds_metadata import read_metadata
from rayfed.data.sets.image_domains import ImageFiles

URL = "https://wilds.stanford.edu/datasets/#camelyon17"
NUMBERS = ("x_coord", "y_coord", "tumor", "center", "split")
HOSPITALS = 5
TRAIN, ID_VAL = 0, 1  # values of the column split that are used; those of hospitals 1 and 2 are not


@dataclass(frozen=True, kw_only=True)
class Camelyon17(ImageFiles):
    """Camelyon17-WILDS (Bandi et al. 2018; Koh et al. 2021, "WILDS"): 455,954 patches of 96 x 96, tumour or none.

    From https://wilds.stanford.edu, 10 GB: `camelyon17_v1.0/metadata.csv` and
    `patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png`. Public domain (CC0).

    Domains and clients are the hospitals. Hospital 1 is WILDS' validation domain and hospital 2 its test domain; both
    are held out by default. With split=published, WILDS' in-distribution validation patches are the test examples of
    hospitals 0, 3 and 4, and hospitals 1 and 2 must be held out.
    """

    name: ClassVar[str] = "camelyon17"

    root: str | None = option(None, help=ROOT_HELP)
    size: int = option(96, low=8, help="side to which images are resized")
    held_out: list[str] = option(["hospital-1", "hospital-2"], help='hospitals no client holds: the "ood" test sets')
    split: str = option("published", choices=("published", "random"), help="WILDS' in-distribution split, or random")

    def available_domains(self) -> tuple[str, ...]:
        return tuple(f"hospital-{number}" for number in range(HOSPITALS))

    def load(self) -> Dataset:
        """Return the patches that are kept; `client` is the hospital.

        Raises:
            UsageError: The table or patches are missing or damaged, or the options contradict each other.
        """
        domains = self.selected_domains()
        without_split = {"hospital-1", "hospital-2"} & set(domains) - set(self.held_out)
        if self.split == "published" and without_split:
            raise UsageError(
                f"data.split=published: {min(without_split)} has no split; hold it out, or use data.split=random"
            )
        expected = "metadata.csv and the folder patches"
        folder = find_dataset_folder(self.root, ("camelyon17_v1.0", "camelyon17"), expected=expected, source=URL)
        path = folder / "metadata.csv"
        table = read_metadata(path, NUMBERS, ("patient", "node"), URL)
        for name, highest in (("tumor", 1), ("center", HOSPITALS - 1)):
            if table[name].max() > highest:
                raise UsageError(f"{path}: {name} {table[name].max()}; expected 0..{highest}")
        numbers = {int(domain[-1]): number for number, domain in enumerate(domains)}
        entries = [
            Entry(
                f"patches/patient_{row.patient}_node_{row.node}/"
                f"patch_patient_{row.patient}_node_{row.node}_x_{row.x_coord}_y_{row.y_coord}.png",
                row.tumor,
                numbers[row.center],
                row.split == ID_VAL,
                row.center,
            )
            for row in table.itertuples()
            if row.center in numbers
        ]
        return self.dataset(Listing.of(folder, entries), domains, 2, published=self.split == "published", natural=True)
