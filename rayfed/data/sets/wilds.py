"""The two image datasets of WILDS with domains of their own: Camelyon17 and RxRx1."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.published import Published, sources
from rayfed.data.readers.class_folders import Entry
from rayfed.data.readers.files import note, readable
from rayfed.data.sets.image_folders import ImageFiles

NUMBERS = ("x_coord", "y_coord", "tumor", "center", "split")
HOSPITALS = 5
ID_VAL = 1  # in Camelyon17's column split: the rows that its authors hold out of the training hospitals
CELLS = ("HEPG2", "HUVEC", "RPE", "U2OS")
UNSEEN = ("val", "test")
CLASSES = 1139
GROUPS = 4
WITHOUT_SPLIT = ("hospital-1", "hospital-2")  # those that WILDS uses for validation and for testing


@dataclass(frozen=True, kw_only=True)
class Camelyon17(Published, ImageFiles):
    """Camelyon17-WILDS (Bandi et al. 2018; Koh et al. 2021, "WILDS"): 455,954 patches of 96 x 96, tumour or none.

    From https://wilds.stanford.edu, 10 GB: `camelyon17_v1.0/metadata.csv` and
    `patches/patient_004_node_4/patch_patient_004_node_4_x_3328_y_21792.png`. Public domain (CC0).

    Domains and clients are the hospitals. Hospital 1 is WILDS' validation domain and hospital 2 its test domain; both
    are left out by default. With split=published, WILDS' in-distribution validation patches are the test examples of
    hospitals 0, 3 and 4, and hospitals 1 and 2 must be left out.
    """

    name: ClassVar[str] = "camelyon17"

    size: int = option(96, low=8, help="side to which images are resized")
    split: str = option("published", choices=("published", "random"), help="WILDS' in-distribution split, or random")

    def __post_init__(self) -> None:
        super().__post_init__()
        selected = self.selected_domains()
        left_out = tuple(name for name in WITHOUT_SPLIT if name in selected)
        object.__setattr__(self, "left_out", left_out)

    def available_domains(self) -> tuple[str, ...]:
        return tuple(f"hospital-{number}" for number in range(HOSPITALS))

    def load(self) -> Dataset:
        """Return the patches that are kept; `client` is the hospital."""
        domains = self.selected_domains()
        without_split = set(WITHOUT_SPLIT) & set(domains) - set(self.left_out)
        if self.split == "published" and without_split:
            remedy = "leave it out, or use data.split=random"
            raise UsageError(f"data.split=published: {min(without_split)} has no split; {remedy}")
        folder = self.find("camelyon17")
        table = _metadata(folder, "camelyon17", NUMBERS, ("patient", "node"), "center", range(HOSPITALS))
        numbers = {}
        for number, domain in enumerate(domains):
            numbers[int(domain[-1])] = number
        entries = []
        for row in table.itertuples():
            if row.center in numbers:
                slide = f"patient_{row.patient}_node_{row.node}"
                patch = f"patch_{slide}_x_{row.x_coord}_y_{row.y_coord}.png"
                image = f"patches/{slide}/{patch}"
                is_test = row.split == ID_VAL
                entry = Entry(image, row.tumor, numbers[row.center], is_test, row.center)
                entries.append(entry)
        published = self.split == "published"
        return self.dataset(folder, entries, domains, 2, published=published, natural=True)


@dataclass(frozen=True, kw_only=True)
class RxRx1(Published, ImageFiles):
    """RxRx1-WILDS (Taylor et al. 2019; Koh et al. 2021, "WILDS"): 125,510 images of 256 x 256, 51 experiments.

    From https://wilds.stanford.edu, 7 GB: `rxrx1_v1.0/metadata.csv` and `images/HEPG2-01/Plate1/B02_s1.png`. Licence
    CC BY-NC-SA 4.0.

    Domains are the cell types, clients the experiments. With split=published, as in WILDS, clients hold the training
    experiments, with the second site for testing. The experiments of WILDS' val and test splits become two "ood"
    domains that no client holds. With split=random, clients hold all experiments.

    FRAug: split=random, test=0.1, groups_per_type=2, 3 or 4, classes=50 and partition=natural. The experiments of a
    cell type are divided in order into four equal groups (a remainder is unused), of which that many become clients.
    """

    name: ClassVar[str] = "rxrx1"

    size: int = option(256, low=8, help="side to which images are resized")
    split: str = option("published", choices=("published", "random"), help="WILDS' experiments and sites, or random")
    classes: int = option(CLASSES, low=2, high=CLASSES, help="number of treatments to use, the first ones")
    groups_per_type: int | None = option(
        None,
        low=1,
        high=GROUPS,
        help="clients per cell type, each with a quarter of its experiments; null: all of them",
    )

    def available_domains(self) -> tuple[str, ...]:
        return CELLS

    def load(self) -> Dataset:
        """Return the images that are kept; `client` is the experiment, or its group."""
        cells = self.selected_domains()
        published = self.split == "published"
        folder = self.find("rxrx1")
        strings = ("dataset", "cell_type", "experiment", "well")
        table = _metadata(folder, "rxrx1", ("plate", "site", "sirna_id"), strings, "cell_type", CELLS)
        is_kept = table.cell_type.isin(cells) & (table.sirna_id < self.classes)
        table = table[is_kept]
        domains = cells
        trained_on = table
        if published:
            domains = (*cells, *UNSEEN)
            trained_on = table[table.dataset == "train"]
        clients = self._clients(trained_on)
        entries = []
        for row in table.itertuples():
            if published and row.dataset in UNSEEN:
                domain = row.dataset
                client = -1
            elif row.experiment in clients:
                domain = row.cell_type
                client = clients[row.experiment]
            else:
                continue
            plate = f"images/{row.experiment}/Plate{row.plate}"
            image = f"{plate}/{row.well}_s{row.site}.png"
            is_test = row.site == 2
            entry = Entry(image, row.sirna_id, domains.index(domain), is_test, client)
            entries.append(entry)
        if published:
            sampling = self.without([*self.left_out, *UNSEEN])
        else:
            sampling = self
        return sampling.dataset(folder, entries, domains, self.classes, published=published, natural=True)

    def _clients(self, table: pandas.DataFrame) -> dict[str, int]:
        """Return the client that holds each experiment."""
        if self.groups_per_type is None:
            experiments = sorted(set(table.experiment))
            return {name: number for number, name in enumerate(experiments)}
        clients: dict[str, int] = {}
        for cell in sorted(set(table.cell_type)):
            experiments = sorted(set(table.experiment[table.cell_type == cell]))
            group_size = len(experiments) // GROUPS
            for number, name in enumerate(experiments[: group_size * self.groups_per_type]):
                clients[name] = CELLS.index(cell) * GROUPS + number // group_size
        return clients


def _metadata(
    folder: Path, source: str, integers: Sequence[str], strings: Sequence[str], column: str, known: Sequence[Any]
) -> pandas.DataFrame:
    """Return some columns of metadata.csv, the table of the images, where `column` has one of the `known` values."""
    kinds = dict.fromkeys(integers, int) | dict.fromkeys(strings, str)
    path = folder / "metadata.csv"
    with readable(path, f"a table with the columns {', '.join(kinds)}"):
        sources()[source].compare(folder, [path.name])
        table = pandas.read_csv(path, usecols=list(kinds), dtype=kinds, keep_default_na=False)
        is_known = table[column].isin(list(known))
        if not is_known.any():
            raise ValueError("no rows")
    unknown = int((~is_known).sum())
    if unknown:
        expected = ", ".join(map(str, known))
        note(f"{path}: {unknown} of {len(table)} rows were left out: {column} is none of {expected}")
    return table[is_known]
