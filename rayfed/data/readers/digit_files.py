"""The file formats of the five domains of Digits-5."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.readers.array_files import Arrays, validated_arrays
from rayfed.data.readers.class_folders import walk
from rayfed.data.readers.decoding import open_image, resize_image, run_in_threads, tell_changes
from rayfed.data.readers.files import readable
from rayfed.data.readers.pickled import read_pickle

CLASSES = tuple("0123456789")
SIDES = ("train", "test")


def read_mat(path: Path, side: str) -> Arrays:
    """Read a .mat file of SVHN or SynthDigits with X [32, 32, 3, n] and y [n, 1]; SVHN labels the digit zero as 10."""
    import scipy.io  # takes half a second

    with readable(path, "a .mat file of X [32, 32, 3, n] and y [n, 1]"):
        content = scipy.io.loadmat(path)
        images, labels = np.moveaxis(content["X"], -1, 0), content["y"].reshape(-1)
        if (labels % 1 == 0).all():  # they may be floats
            labels = np.where(labels == 10, 0, labels).astype(np.int64)
    return validated_arrays(path, images, labels, (32, 32, 3), 10)


def read_usps(path: Path, side: str) -> Arrays:
    """Read USPS in LIBSVM's text format with bzip2: "label 1:value … 256:value", labels 1..10, values in [-1, 1]."""
    import torchvision  # imported late: takes half a second or more

    with readable(path, "bzip2 with lines of a label 1..10 and 256 values index:value"):
        read = torchvision.datasets.USPS(path.parent, train=side == "train")
    return validated_arrays(path, read.data, read.targets, (16, 16), 10)


def read_fedbn(path: Path, side: str) -> Arrays:
    """Read FedBN's pickles of (images, labels)."""
    kind = "a pickled pair of images and labels"
    with readable(path, kind):
        images, labels = read_pickle(path, kind)
    in_colour = isinstance(images, np.ndarray) and images.ndim == 4
    return validated_arrays(path, images, labels, (None, None, 3) if in_colour else (None, None), 10)


def read_folders(path: Path, side: str) -> Arrays:
    """Read the images in folders 0 … 9."""
    entries = walk(path.parent, {0: path.name}, CLASSES)
    return _read_images(path.parent, [(entry.file, entry.label) for entry in entries])


def read_mnist_m_tensors(path: Path, side: str) -> Arrays:
    """Read a pair of tensors, images [n, 28, 28, 3] and labels [n], from a .pt file."""
    import torch  # imported late: other datasets need no torch to load

    with readable(path, "a pair of tensors, images and labels, written by torch.save"):
        images, labels = (part.numpy() for part in torch.load(path, map_location="cpu", weights_only=True))
    return validated_arrays(path, images, labels, (None, None, 3), 10)


def read_mnist_m_lists(path: Path, side: str) -> Arrays:
    """Read Ganin's folder mnist_m_train or mnist_m_test by its list of lines such as "00000000.png 5"."""
    entries = []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        file, _, label = line.rpartition(" ")
        if not file or label not in CLASSES:
            raise UsageError(f"{path}, line {number}: {line[:60]!r}; expected a file name and a label 0..9")
        entries.append((f"mnist_m_{side}/{file}", int(label)))
    if not entries:
        raise UsageError(f"{path}: has no lines; expected one per image")
    return _read_images(path.parent, entries)


def read_mnist_m_pickle(path: Path, side: str) -> Arrays:
    """Read mnistm_data.pkl, a dict with the keys train, valid and test, and train_label, … for their labels."""
    kind = "a pickled dict with the keys train, train_label, valid, …, test_label"
    keys = ("train", "valid") if side == "train" else ("test",)
    with readable(path, kind):
        content = read_pickle(path, kind)
        images, labels = (np.concatenate([content[f"{key}{end}"] for key in keys]) for end in ("", "_label"))
    return validated_arrays(path, images, labels, (None, None, 3), 10)


def _read_images(folder: Path, entries: list[tuple[str, int]]) -> Arrays:
    """Read image files, resized to squares as wide as the first one: uint8 [n, side, side, 3]."""
    side = open_image(folder / entries[0][0])[0].width
    images, changes = np.empty((len(entries), side, side, 3), np.uint8), np.zeros(len(entries), np.uint8)

    def read(row: int) -> None:
        image, changes[row] = open_image(folder / entries[row][0])
        images[row] = resize_image(image, side).transpose(1, 2, 0)

    run_in_threads(read, len(entries), f"{folder.name}: reading images (only once)")
    tell_changes(str(folder), changes)
    return validated_arrays(folder, images, [label for _, label in entries], (None, None, 3), 10)


class FileFormat(NamedTuple):
    """A file format of a domain: its training and test files, and the reader of one of them.

    A "file" may be a folder; `folders` are those with further files that the reader opens.
    """

    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[Path, str], Arrays]
    folders: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        return self.train + self.test + self.folders

    def files(self, folder: Path) -> list[str]:
        """Return all files that are read, relative to `folder`."""
        files: list[str] = []
        for name in self.required:
            below = sorted(path for path in (folder / name).rglob("*") if path.is_file())
            files += [os.path.relpath(path, folder) for path in below] or [name]
        return files


COMMON_FORMATS = (
    FileFormat(("train.pkl",), ("test.pkl",), read_fedbn),
    FileFormat(tuple(f"partitions/train_part{number}.pkl" for number in range(10)), ("test.pkl",), read_fedbn),
    FileFormat(("train",), ("test",), read_folders),
)
FORMATS = {
    "mnist": (),  # beside the IDX files
    "svhn": (FileFormat(("train_32x32.mat",), ("test_32x32.mat",), read_mat),),
    "usps": (FileFormat(("usps.bz2",), ("usps.t.bz2",), read_usps),),
    "synthdigits": (FileFormat(("synth_train_32x32.mat",), ("synth_test_32x32.mat",), read_mat),),
    "mnist_m": (
        FileFormat(("mnist_m_train.pt",), ("mnist_m_test.pt",), read_mnist_m_tensors),
        FileFormat(
            ("mnist_m_train_labels.txt",),
            ("mnist_m_test_labels.txt",),
            read_mnist_m_lists,
            folders=("mnist_m_train", "mnist_m_test"),
        ),
        FileFormat(("mnistm_data.pkl",), ("mnistm_data.pkl",), read_mnist_m_pickle),
    ),
}
