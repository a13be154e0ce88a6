"""Images in folders: PACS, OfficeHome, Office-Caltech-10, DomainNet's ten classes, Tiny ImageNet, and a user's own."""

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute
from rayfed.data.dataset import Dataset, from_two_files, index_within_group
from rayfed.data.dataset_options import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    MEAN_HELP,
    STD_HELP,
    ChannelNormalisation,
    DomainSampling,
)
from rayfed.data.published import Published
from rayfed.data.readers.class_folders import (
    Entry,
    as_columns,
    class_names,
    folders,
    image_files,
    refuse_loose_images,
    tell_absent_classes,
    walk,
)
from rayfed.data.readers.decoding import decode_images
from rayfed.data.readers.files import existing, readable, tell_left_out
from rayfed.data.splits import split_named

DOMAINS = ("clipart", "infograph", "painting", "quickdraw", "real", "sketch")
Spellings = dict[str, tuple[str, ...]]  # the common spellings of the folder of each domain


@dataclass(frozen=True, kw_only=True)
class ImageFiles(DomainSampling):
    """Image files in domains; only those that are kept are decoded."""

    default_partition: ClassVar[str] = "domains"
    stratified: ClassVar[bool] = False
    """Whether partitions stratify by default; see `Dataset.stratified`."""

    size: int = option(64, low=8, help="side to which images are resized")
    mean: list[float] = option([0.0], help=MEAN_HELP)
    std: list[float] = option([1.0], above=0, help=STD_HELP)

    def dataset(
        self,
        root: Path,
        entries: Sequence[Entry],
        domains: tuple[str, ...],
        num_classes: int,
        *,
        published: bool,
        natural: bool = False,
    ) -> Dataset:
        """Return the images of `entries`, below `root`, that are kept.

        `source` is the domain, `index` the position of an image among the entries of its domain. If `published`, the
        test and validation images are those of `entries`; else test images are drawn. If `natural`, the clients are
        those of `entries`.
        """
        files, labels, domain, is_test, client, is_val = as_columns(entries)
        rows_of = {}
        for number, name in enumerate(domains):
            rows_of[name] = np.flatnonzero(domain == number)
        sizes = {name: len(rows) for name, rows in rows_of.items()}
        is_held_out = is_test | is_val
        held_out = {name: is_held_out[rows] for name, rows in rows_of.items()}
        if published:
            kept = self.sample(sizes, held_out)
        else:
            kept = self.sample(sizes, None)
        parts = [rows_of[name][part.rows] for name, part in kept.items()]
        rows = np.concatenate(parts)
        drawn = np.concatenate([part.is_test for part in kept.values()])
        columns = self.normalisation(3)
        if published:
            columns |= {"is_test": is_test[rows], "is_val": is_val[rows]}
        else:
            columns |= {"is_test": drawn, "is_val": None}
        if natural:
            columns |= {"client": client[rows]}
        return Dataset.of(
            self.name,
            decode_images(self.name, root, files[rows].tolist(), self.size),
            labels[rows],
            num_classes=num_classes,
            domain=domain[rows],
            domains=domains,
            source=domain[rows],
            sources=domains,
            index=index_within_group(domain)[rows],
            ood=self.left_out,
            stratified=self.stratified,
            **columns,
        )


@dataclass(frozen=True, kw_only=True)
class DomainFolders(Published, ImageFiles):
    """Images in `<domain>/<class>/*.jpg` below the folder of `source`; the split is random."""

    source: ClassVar[str]
    folders: ClassVar[Spellings]
    classes: ClassVar[tuple[str, ...]] = ()  # (): the names of the folders
    count: ClassVar[int]
    ignore_others: ClassVar[bool] = False  # whether there may be folders of other classes

    def available_domains(self) -> tuple[str, ...]:
        return tuple(self.folders)

    def load(self) -> Dataset:
        """Return the images that are kept of the selected domains, one domain after the other."""
        domains = self.selected_domains()
        folder = self.find(self.source)
        domain_folders = {}
        for number, name in enumerate(domains):
            domain_folders[number] = self.domain_folder(folder, name)
        classes = self.classes or class_names(folder, domain_folders.values(), self.count)
        entries = walk(folder, domain_folders, classes, ignore_others=self.ignore_others)
        return self.dataset(folder, entries, domains, self.count, published=False)

    def domain_folder(self, folder: Path, domain: str) -> str:
        """Return the name of a domain's folder: the first spelling that exists."""
        spellings = self.folders[domain]
        for name in spellings:
            if (folder / name).is_dir():
                return name
        return spellings[0]


@dataclass(frozen=True, kw_only=True)
class LargeImages(DomainFolders):
    """Datasets whose images have the size and the normalisation of ImageNet by default."""

    size: int = option(224, low=8, help="side to which images are resized")
    mean: list[float] = option(IMAGENET_MEAN, help=MEAN_HELP)
    std: list[float] = option(IMAGENET_STD, above=0, help=STD_HELP)


@dataclass(frozen=True, kw_only=True)
class Pacs(LargeImages):
    """PACS (Li et al. 2017, "Deeper, Broader and Artier Domain Generalization"): 9,991 images, 7 classes, four domains.

    From https://dali-dl.github.io/project_iccv2017.html: `PACS/art_painting/dog/*.jpg`, also below `PACS/kfold`. No
    licence is stated; for research.
    """

    name: ClassVar[str] = "pacs"
    source: ClassVar[str] = "pacs"
    folders: ClassVar[Spellings] = {name: (name,) for name in ("photo", "art_painting", "cartoon", "sketch")}
    classes: ClassVar[tuple[str, ...]] = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
    count: ClassVar[int] = 7


@dataclass(frozen=True, kw_only=True)
class OfficeHome(LargeImages):
    """OfficeHome: 15,588 images of 65 classes in four domains (Venkateswara et al. 2017, "Deep Hashing Network for
    Unsupervised Domain Adaptation").

    From https://www.hemanthdv.org/officeHomeDataset.html: `OfficeHomeDataset_10072016/Real World/Alarm_Clock/*.jpg`.
    For non-commercial research and education.
    """

    name: ClassVar[str] = "office_home"
    source: ClassVar[str] = "office_home"
    folders: ClassVar[dict[str, tuple[str, ...]]] = {
        "art": ("Art", "art"),
        "clipart": ("Clipart", "clipart"),
        "product": ("Product", "product"),
        "real_world": ("Real World", "Real_World", "RealWorld", "real_world"),
    }
    count: ClassVar[int] = 65


@dataclass(frozen=True, kw_only=True)
class OfficeCaltech10(DomainFolders):
    """Office-Caltech-10: 2,533 images of 10 classes in four domains (Gong, Shi, Sha and Grauman 2012, "Geodesic Flow
    Kernel for Unsupervised Domain Adaptation").

    From the links in https://github.com/med-air/FedBN: `office_caltech_10/amazon/back_pack/*.jpg`. No licence is
    stated; for research.
    """

    name: ClassVar[str] = "office_caltech10"
    source: ClassVar[str] = "office_caltech10"
    folders: ClassVar[Spellings] = {name: (name, name.capitalize()) for name in ("amazon", "caltech", "dslr", "webcam")}
    classes: ClassVar[tuple[str, ...]] = (
        "back_pack", "bike", "calculator", "headphones", "keyboard",
        "laptop_computer", "monitor", "mouse", "mug", "projector",
    )  # fmt: skip
    count: ClassVar[int] = 10


@dataclass(frozen=True, kw_only=True)
class DomainNet10(DomainFolders):
    """Ten classes of DomainNet in six domains, those of FedBN (Li et al. 2021) and ADCOL: 22,851 images.

    From https://ai.bu.edu/M3SDA (the cleaned version) or the links in https://github.com/med-air/FedBN:
    `DomainNet/clipart/bird/*.jpg`; folders of other classes are ignored. For research (fair use).
    """

    name: ClassVar[str] = "domainnet10"
    source: ClassVar[str] = "domainnet"
    folders: ClassVar[dict[str, tuple[str, ...]]] = {name: (name,) for name in DOMAINS}
    classes: ClassVar[tuple[str, ...]] = (
        "bird", "feather", "headphones", "ice_cream", "teapot", "tiger", "whale", "windmill", "wine_glass", "zebra",
    )  # fmt: skip
    count: ClassVar[int] = 10
    ignore_others: ClassVar[bool] = True


PARTS = ("train", "val")
CLASSES = 200


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(Published, ChannelNormalisation):
    """Tiny ImageNet (Le and Yang 2015): 100,000 training and 10,000 validation images of 200 classes.

    From http://cs231n.stanford.edu/tiny-imagenet-200.zip, unpacked: `tiny-imagenet-200/wnids.txt`,
    `train/n01443537/images/*.JPEG`, `val/val_annotations.txt`, `val/images/*.JPEG`.
    ImageNet's terms: non-commercial research and education.

    Classes are numbered as in wnids.txt. `is_test` marks the validation images; `source` is train or val, `index` the
    position in its listing. DBE uses only the training images: parts=[train].
    """

    name: ClassVar[str] = "tiny_imagenet"
    default_partition: ClassVar[str] = "dirichlet"

    parts: list[str] = option(list(PARTS), choices=PARTS, help="published splits to use")
    size: int = option(64, low=8, help="side to which images are resized")

    def load(self) -> Dataset:
        """Return the images of the selected splits."""
        folder = self.find("tiny_imagenet")
        with readable(folder / "wnids.txt", f"the names of {CLASSES} class folders"):
            wnids = (folder / "wnids.txt").read_text().split()
            if len(set(wnids)) != CLASSES:
                raise ValueError(f"{len(set(wnids))} different classes")
        entries = []
        left_out = Counter[str]()
        if "train" not in self.parts:
            wnids = []
        for label, wnid in enumerate(wnids):
            place = folder / "train" / wnid / "images"
            with readable(place, "a folder of images"):
                files = image_files(place, left_out)
                if not files:
                    raise ValueError("it contains no image")
            for file in files:
                entries.append(Entry(f"train/{wnid}/images/{file}", label, 0))
        tell_left_out(folder, left_out)
        if "val" in self.parts:
            path = folder / "val" / "val_annotations.txt"
            with readable(path, "lines with an image and its class"):
                lines = path.read_text().splitlines()
                pairs = []
                for line in lines:
                    pairs.append(line.split()[:2])
                for file, wnid in pairs:
                    entries.append(Entry(f"val/images/{file}", wnids.index(wnid), 0, True))
        paths, labels, _, is_test, *_ = as_columns(entries)
        images = decode_images(self.name, folder, paths.tolist(), self.size)
        columns = from_two_files(is_test, PARTS) | self.normalisation(3)
        return Dataset.of(self.name, images, labels, num_classes=CLASSES, **columns)


LAYOUT = "expected <class>/*, <domain>/<class>/*, or either of them in train/ beside test/ or val/"
WHOLE = "images"  # the only domain of folders without domains


@dataclass(frozen=True)
class Layout:
    """What the folders of a user's images stand for.

    Attributes:
        splits: The folders of splits, and train, val or test for each; {"": "train"}: there are none.
        domains: The folders of the domains, or `WHOLE`.
        classes: The folders of the classes.
    """

    splits: dict[str, str]
    domains: tuple[str, ...]
    classes: tuple[str, ...]

    @property
    def has_splits(self) -> bool:
        """Whether there are folders of splits."""
        return "" not in self.splits


@dataclass(frozen=True, kw_only=True)
class ImageFolder(ImageFiles):
    """Images in `<folder>/<class>/` or `<folder>/<domain>/<class>/`, or in either below `train` beside `test` or `val`.

    Classes are numbered in the order of their folders' names; images in folders below a class belong to it. A domain
    may have no image of a class, which a line says. Without domain folders, there is one domain, "images";
    `domains=[images]` says so where the folders of classes have folders.

    The split is drawn (`test`), unless there are folders `train` and `test` or `val`, as torchvision has them: then
    these are the test images. With both, those of `val` are for validation. Other names of `val` are valid, validation
    and dev. Folders named like splits are domains only if `domains` names them.
    """

    name: ClassVar[str] = "imagefolder"
    stratified: ClassVar[bool] = True

    folder: str = option(help="folder that contains the folders of the domains, of the classes, or train and test")

    def available_domains(self) -> tuple[str, ...]:
        return self._layout().domains

    def load(self) -> Dataset:
        """Return the images that are kept; UsageError if folders or files are missing, or do not fit the options."""
        root = absolute(self.folder)
        layout = self._layout()
        domains = self.selected_domains()
        entries = list[Entry]()
        held = dict[str, set[int]]()
        inner = domains
        if layout.domains == (WHOLE,):
            inner = ("",)
        may_lack_classes = len(layout.splits) * len(inner) > 1
        for folder, split in layout.splits.items():
            if inner != ("",):
                refuse_loose_images(root / folder)
            paths = {}
            for number, name in enumerate(inner):
                paths[number] = os.path.join(folder, name)
            found = walk(root, paths, layout.classes, may_lack_classes=may_lack_classes)
            is_test = split == "test"
            is_val = split == "val"
            entries += [entry._replace(is_test=is_test, is_val=is_val) for entry in found]
            held |= {path: set() for path in paths.values()}
            for entry in found:
                held[paths[entry.domain]].add(entry.label)
        if may_lack_classes:
            tell_absent_classes(root, held, layout.classes)
        return self.dataset(root, entries, domains, len(layout.classes), published=layout.has_splits)

    def _layout(self) -> Layout:
        """Return what the folders stand for; UsageError if that cannot be seen."""
        root = existing("data.folder", self.folder, LAYOUT, "folder")
        where = f"data.folder={self.folder}"
        outer = folders(root)
        splits = self._splits(outer)
        if "" not in splits:
            outer = _inner_folders(root, splits)
            self._refuse_untrained(root, splits, outer)
        combined = itertools.starmap(os.path.join, itertools.product(splits, outer))
        inner = _inner_folders(root, combined)
        is_whole = not inner or self.domains == [WHOLE]
        if is_whole:
            domains = [WHOLE]
            classes = outer
        else:
            domains = outer
            classes = inner
        for name in (*domains, *classes):
            if split_named(name) and name not in self.domains:
                remedy = f"to make the folders domains, name them with data.domains=[{','.join(outer)}]"
                raise UsageError(f"{where}: {name} is named like a split; {LAYOUT}; {remedy}")
        if not classes:
            raise UsageError(f"{where}: no images in folders; {LAYOUT}")
        return Layout(splits, tuple(domains), tuple(classes))

    def _splits(self, names: Sequence[str]) -> dict[str, str]:
        """Return train, val or test for each of the folders `names`; {"": "train"} if they are no splits."""
        splits = {name: split_named(name) or "" for name in names}
        kinds = set(splits.values())
        is_not_split = "" in kinds or "train" not in kinds or len(kinds) == 1
        if is_not_split or set(self.domains) & set(names):
            return {"": "train"}
        if "test" in kinds:
            return splits
        tested = {}
        for name, split in splits.items():
            if split == "val":
                tested[name] = "test"
        return splits | tested  # as torchvision has it

    def _refuse_untrained(self, root: Path, splits: Mapping[str, str], names: Sequence[str]) -> None:
        """Raise UsageError if one of the folders `names` is in no folder for training."""
        training = []
        for split, kind in splits.items():
            if kind == "train":
                training.append(split)
        trained = _inner_folders(root, training)
        for name in names:
            if name not in trained:
                having = (split for split in splits if (root / split / name).is_dir())
                there = next(having)
                folder = root / training[0]
                raise UsageError(f"{folder}: no folder {name}, which {there} has; write names alike")


def _inner_folders(root: Path, paths: Iterable[str]) -> list[str]:
    """Return the sorted names of the folders in those of `paths`, below `root`, that exist."""
    names = set[str]()
    for path in paths:
        if (root / path).is_dir():
            names.update(folders(root / path))
    return sorted(names)
