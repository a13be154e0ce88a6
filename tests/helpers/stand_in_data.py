"""Stand-ins for data sets that are not here: their sizes, shapes, classes, domains and clients, with nothing to see.

`install` puts them behind `rayfed.data.loading`, and what is built from them is right in everything that a plan can
look at. Partitions are real, and so are the options of the data, as far as they decide who holds how much.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import DomainSampling
from rayfed.data.population import Examples, TestSet
from rayfed.data.sets import rotated
from rayfed.data.sets.ag_news import AgNews
from rayfed.data.sets.cifar import CifarFiles
from rayfed.data.sets.digits5 import Digits5
from rayfed.data.sets.image_folders import DomainFolders, TinyImageNet
from rayfed.data.sets.mnist import IdxFiles
from rayfed.data.sets.rotated import RotatedCifar, RotationMix, angle_name
from rayfed.data.sets.uci_har import UciHar
from rayfed.data.sets.wilds import RxRx1
from rayfed.models import from_torchvision

# Images of each domain, and classes
DOMAINS = {
    "digits5": ({"mnist": 70_000, "svhn": 99_289, "usps": 9_298, "synthdigits": 488_953, "mnist_m": 68_002}, 10),
    "office_caltech10": ({"amazon": 958, "caltech": 1_123, "dslr": 157, "webcam": 295}, 10),
    # six of equal size: only their sum is known here
    "domainnet10": (
        dict.fromkeys(("clipart", "infograph", "painting", "quickdraw", "real", "sketch"), 22_851 // 6),
        10,
    ),
    "pacs": ({"photo": 1_670, "art_painting": 2_048, "cartoon": 2_344, "sketch": 3_929}, 7),
    "office_home": ({"art": 2_427, "clipart": 4_365, "product": 4_439, "real_world": 4_357}, 65),
}
EXPERIMENTS = {"HEPG2": 11, "HUVEC": 24, "RPE": 11, "U2OS": 5}  # of RxRx1, with two images of each treatment


class StandIns:
    """The loaders of the stand-ins; blank images lie in `folder`, as files without contents."""

    def __init__(self, folder: Path):
        self.folder = folder

    def blank(self, shape: Sequence[int], dtype: str = "uint8") -> np.ndarray:
        """Zeros that take no room, of which only what is looked at is read."""
        path = self.folder / f"{dtype}-{'x'.join(map(str, shape))}"
        if not path.exists():
            np.memmap(path, dtype, "w+", shape=tuple(shape))
        return np.memmap(path, dtype, "r", shape=tuple(shape))

    def labels(self, count: int, classes: int) -> np.ndarray:
        """All classes alike, in random order."""
        return np.random.default_rng(0).permutation(np.arange(count) % classes)

    def plain(self, name: str, shape: Sequence[int], classes: int, counts: Sequence[int], **others: Any) -> Dataset:
        """Of one domain, with so many examples for training and, after them, for testing."""
        count = sum(counts)
        images = self.blank((count, *shape), others.pop("dtype", "uint8"))
        is_test = np.arange(count) >= counts[0]
        return Dataset.of(name, images, self.labels(count, classes), is_test=is_test, num_classes=classes, **others)

    def grey(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """MNIST or Fashion-MNIST."""
        index = np.concatenate([np.arange(60_000), np.arange(10_000)])
        return self.blank((70_000, 28, 28)), self.labels(70_000, 10), np.arange(70_000) >= 60_000, index

    def cifar(self, data: CifarFiles) -> Dataset:
        return self.plain(data.name, (3, 32, 32), data.classes, (50_000, 10_000), **data.normalisation(3))

    def turned(self, data: RotatedCifar) -> Dataset:
        angles = tuple(data.angles)
        tests = Examples(self.blank((10_000, 3, 32, 32)), self.labels(10_000, data.classes))
        return self.plain(
            data.name,
            (3, 32, 32),
            data.classes,
            (50_000, 0),
            tests=tuple(TestSet(angle_name(angle), "test", tests) for angle in angles),
            client_view=RotationMix(angles, data.angle_alpha, data.seed),
            **data.normalisation(3),
        )

    def tiny(self, data: TinyImageNet) -> Dataset:
        counts = [size * (part in data.parts) for part, size in (("train", 100_000), ("val", 10_000))]
        return self.plain(data.name, (3, data.size, data.size), 200, counts, **data.normalisation(3))

    def news(self, data: AgNews) -> Dataset:
        return self.plain(data.name, (data.length,), 4, (120_000, 7_600), dtype="int64")

    def sensors(self, data: UciHar) -> Dataset:
        return self.plain(data.name, (9, 1, 128), 6, (7_352, 2_947), dtype="float32", client=1 + np.arange(10_299) % 30)

    def domains(self, data: DomainSampling) -> Dataset:
        sizes, classes = DOMAINS[data.name]
        return self.sampled(data, {name: sizes[name] for name in data.selected_domains()}, classes)

    def cells(self, data: RxRx1) -> Dataset:
        groups = data.groups_per_type
        each = {cell: EXPERIMENTS[cell] // 4 * 2 * data.classes for cell in data.selected_domains()}  # of a client
        found = self.sampled(data, {cell: groups * size for cell, size in each.items()}, data.classes)
        own = [np.flatnonzero(found.domain == number) for number in range(len(each))]
        client = np.empty(len(found), np.int64)
        for number, rows in enumerate(own):
            client[rows] = number * groups + np.arange(len(rows)) % groups
        return Dataset(**{**vars(found), "client": client})

    def sampled(self, data: DomainSampling, sizes: Mapping[str, int], classes: int) -> Dataset:
        """Domains of which the data's own rules keep a part."""
        kept = data.sample(sizes)
        domain = np.repeat(np.arange(len(kept), dtype=np.int16), [len(part.rows) for part in kept.values()])
        return Dataset.of(
            data.name,
            self.blank((len(domain), 3, data.size, data.size)),
            self.labels(len(domain), classes),
            is_test=np.concatenate([part.is_test for part in kept.values()]),
            num_classes=classes,
            domain=domain,
            domains=tuple(kept),
            ood=data.left_out,
            **data.normalisation(3),
        )


def install(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Puts the stand-ins in the place of all files of data and of trained weights; what is cached goes to `folder`."""
    made = StandIns(folder)
    loaders = {
        AgNews: made.news,
        CifarFiles: made.cifar,
        Digits5: made.domains,
        DomainFolders: made.domains,
        RotatedCifar: made.turned,
        RxRx1: made.cells,
        TinyImageNet: made.tiny,
        UciHar: made.sensors,
    }
    for kind, load in loaders.items():
        monkeypatch.setattr(kind, "load", lambda self, load=load: load(self))
    monkeypatch.setattr(IdxFiles, "files", lambda self: made.grey())
    monkeypatch.setattr(rotated, "_rotated", lambda images, angle: images)
    monkeypatch.setenv("RAYFED_CACHE", str(folder))
    create = from_torchvision._create
    monkeypatch.setattr(from_torchvision, "_create", lambda arch, pretrained, classes: create(arch, False, classes))
