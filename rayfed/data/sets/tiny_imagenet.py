"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.normalisation import ChannelNormalisation
from rayfed.data.readers.class_folders import Entry, Listing, image_files
from rayfed.data.readers.dataset_paths import ROOT_HELP, find_dataset_folder
from rayfed.data.readers.decoding import decode_images

PARTS, CLASSES = ("train", "val"), 200
URL = "http://cs231n.stanford.edu/tiny-imagenet-200.zip"


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(ChannelNormalisation):
    """Tiny ImageNet (Le and Yang 2015): 100,000 training and 10,000 validation images of 200 classes.

    From http://cs231n.stanford.edu/tiny-imagenet-200.zip (md5 90528d7ca1a48142e341f4ef8d21d0de), unpacked:
    `tiny-imagenet-200/wnids.txt`, `train/n01443537/images/*.JPEG`, `val/val_annotations.txt`, `val/images/*.JPEG`.
    ImageNet's terms: non-commercial research and education.

    Classes are numbered as in wnids.txt. `is_test` marks the validation images; `source` is train or val, `index` the
    position in its listing. DBE uses only the training images: parts=[train].
    """

    name: ClassVar[str] = "tiny_imagenet"
    default_partition: ClassVar[str] = "dirichlet"

    root: str | None = option(None, help=ROOT_HELP)
    parts: list[str] = option(list(PARTS), choices=PARTS, help="published splits to use")
    size: int = option(64, low=8, help="side to which images are resized")

    def load(self) -> Dataset:
        """Return the images of the selected splits.

        Raises:
            UsageError: Files are missing, empty or damaged.
        """
        names = ("tiny-imagenet-200", "tiny_imagenet")
        folder = find_dataset_folder(self.root, names, expected="wnids.txt, train and val", source=URL)
        wnids = _lines(folder / "wnids.txt", "the names of 200 class folders")
        if len(wnids) != CLASSES or len(set(wnids)) != CLASSES:
            raise UsageError(f"{folder / 'wnids.txt'}: {len(set(wnids))} different classes; expected {CLASSES}")
        labels = {wnid: label for label, wnid in enumerate(wnids)}
        entries = []
        if "train" in self.parts:
            entries += _train(folder, wnids)
        if "val" in self.parts:
            entries += _val(folder, labels)
        listing = Listing.of(folder, entries)
        return Dataset.of(
            self.name,
            decode_images(self.name, folder, listing.files.tolist(), self.size),
            listing.labels,
            is_test=listing.is_test,
            num_classes=CLASSES,
            source=listing.is_test.astype(np.int8),
            sources=PARTS,
            index=index_within_group(listing.is_test),
            **self.normalisation(),
        )


def _train(folder: Path, wnids: Sequence[str]) -> list[Entry]:
    entries = []
    for label, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        files = image_files(images) if images.is_dir() else []
        if not files:
            raise UsageError(f"{images}: contains no image; expected the training images of {wnid}; from {URL}")
        entries += [Entry(f"train/{wnid}/images/{file}", label, 0) for file in files]
    return entries


def _val(folder: Path, labels: Mapping[str, int]) -> list[Entry]:
    path, entries = folder / "val" / "val_annotations.txt", []
    for number, line in enumerate(_lines(path, "one line per image: file, class and box"), start=1):
        file, _, rest = line.partition("\t")
        wnid = rest.split("\t")[0]
        if wnid not in labels:
            raise UsageError(f"{path}, line {number}: class {wnid!r}; expected one of wnids.txt")
        entries.append(Entry(f"val/images/{file}", labels[wnid], 0, True))
    return entries


def _lines(path: Path, expected: str) -> list[str]:
    lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
    if not lines:
        raise UsageError(f"{path}: missing or empty; expected {expected}; from {URL}")
    return [line.strip() for line in lines if line.strip()]
