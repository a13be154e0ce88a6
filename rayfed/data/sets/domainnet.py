"""DomainNet with all 345 classes, and with the ten of FedBN."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.readers.class_folders import Entry, Listing
from rayfed.data.sets.fedbn_lists import FedBnLists

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")


@dataclass(frozen=True, kw_only=True)
class DomainNet10(FedBnLists):
    """Ten classes of DomainNet in six domains, those of FedBN (Li et al. 2021) and ADCOL: 22,851 images.

    From https://ai.bu.edu/M3SDA (the cleaned version) or the links in https://github.com/med-air/FedBN:
    `DomainNet/clipart/bird/*.jpg`; folders of other classes are ignored. With split=published, FedBN's lists
    `DomainNet/clipart_train.pkl`, `clipart_test.pkl`, … For research (fair use).
    """

    name: ClassVar[str] = "domainnet10"
    dataset_folders: ClassVar[tuple[str, ...]] = ("DomainNet", "domainnet", "domain_net")
    folders: ClassVar[dict[str, tuple[str, ...]]] = {name: (name,) for name in DOMAINS}
    classes: ClassVar[tuple[str, ...]] = (
        "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
    )  # fmt: skip
    count: ClassVar[int] = 10
    url: ClassVar[str] = "https://ai.bu.edu/M3SDA"
    ignore_others: ClassVar[bool] = True


@dataclass(frozen=True, kw_only=True)
class DomainNet(DomainNet10):
    """DomainNet (Peng et al. 2019, "Moment Matching for Multi-Source Domain Adaptation"): 586,575 images of 345 classes
    in six domains.

    From https://ai.bu.edu/M3SDA: the six archives and the twelve lists `DomainNet/clipart_train.txt`,
    `clipart_test.txt`, … with lines such as `clipart/aircraft_carrier/clipart_001_000001.jpg 0`. For research (fair
    use). The images take 7.2 GB of the cache at 64 x 64, and 88 GB at 224 x 224; `per_party` or `share` reduces this.
    """

    name: ClassVar[str] = "domainnet"
    classes: ClassVar[tuple[str, ...]] = ()
    count: ClassVar[int] = 345

    split: str = option(
        "published", choices=("published", "random"), help="the split of the lists, or a random one of all images"
    )

    def load(self) -> Dataset:
        """Return the images in DomainNet's lists.

        Raises:
            UsageError: Lists or images are missing, empty or damaged, or an option does not match them.
        """
        domains = self.selected_domains()
        folder = self.dataset_folder()
        entries = [
            Entry(file, label, number, part == "test")
            for number, domain in enumerate(domains)
            for part in ("train", "test")
            for file, label in read_list(folder / f"{domain}_{part}.txt", self.count, self.url)
        ]
        return self.dataset(Listing.of(folder, entries), domains, self.count, published=self.split == "published")


def read_list(path: Path, classes: int, url: str) -> list[tuple[str, int]]:
    """Return the files and labels of a list with one line "file label" per image."""
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected DomainNet's list of images and labels; from {url}")
    entries = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        file, _, label = line.rpartition(" ")
        if not file or not label.isdecimal():
            raise UsageError(f"{path}, line {number}: {line[:80]!r}; expected a file name and a label 0..{classes - 1}")
        if int(label) >= classes:
            raise UsageError(f"{path}, line {number}: label {label}; expected 0..{classes - 1}")
        entries.append((file, int(label)))
    if not entries:
        raise UsageError(f"{path}: has no lines; expected one per image")
    return entries
