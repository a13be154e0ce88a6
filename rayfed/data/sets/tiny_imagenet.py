"""Tiny ImageNet: 200 classes of ImageNet at 64 x 64."""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.normalisation import ChannelNormalisation
from rayfed.data.published import Published
from rayfed.data.readers.class_folders import Entry, Listing, image_files
from rayfed.data.readers.decoding import decode_images
from rayfed.data.readers.files import readable, tell_left_out

PARTS, CLASSES = ("train", "val"), 200


@dataclass(frozen=True, kw_only=True)
class TinyImageNet(Published, ChannelNormalisation):
    """Tiny ImageNet (Le and Yang 2015): 100,000 training and 10,000 validation images of 200 classes.

    From http://cs231n.stanford.edu/tiny-imagenet-200.zip (md5 90528d7ca1a48142e341f4ef8d21d0de), unpacked:
    `tiny-imagenet-200/wnids.txt`, `train/n01443537/images/*.JPEG`, `val/val_annotations.txt`, `val/images/*.JPEG`.
    ImageNet's terms: non-commercial research and education.

    Classes are numbered as in wnids.txt. `is_test` marks the validation images; `source` is train or val, `index` the
    position in its listing. DBE uses only the training images: parts=[train].
    """

    name: ClassVar[str] = "tiny_imagenet"
    default_partition: ClassVar[str] = "dirichlet"

    parts: list[str] = option(list(PARTS), choices=PARTS, help="published splits to use")
    size: int = option(64, low=8, help="side to which images are resized")

    def load(self) -> Dataset:
        """Return the images of the selected splits.

        Raises:
            UsageError: Files are missing, empty or damaged.
        """
        folder = self.find("tiny_imagenet")
        with readable(folder / "wnids.txt", f"the names of {CLASSES} class folders"):
            wnids = (folder / "wnids.txt").read_text().split()
            if len(set(wnids)) != CLASSES:
                raise ValueError(f"{len(set(wnids))} different classes")
        entries, left_out = [], Counter[str]()
        for label, wnid in enumerate(wnids if "train" in self.parts else ()):
            images = folder / "train" / wnid / "images"
            with readable(images, "a folder of images"):
                files = image_files(images, left_out)
                if not files:
                    raise ValueError("it contains no image")
            entries += [Entry(f"train/{wnid}/images/{file}", label, 0) for file in files]
        tell_left_out(folder, left_out)
        if "val" in self.parts:
            path = folder / "val" / "val_annotations.txt"
            with readable(path, "lines with an image and its class"):
                pairs = [line.split()[:2] for line in path.read_text().splitlines()]
                entries += [Entry(f"val/images/{file}", wnids.index(wnid), 0, True) for file, wnid in pairs]
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
