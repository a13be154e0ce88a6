"""CIFAR-10 and CIFAR-100 from their pickle files for Python, in the folders that torchvision uses."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.paths import read_file
from rayfed.data.dataset import Dataset, from_two_files
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.published import Published, sources
from rayfed.data.readers.array_files import Arrays, join_splits, read_once, validated_arrays
from rayfed.data.readers.files import readable
from rayfed.data.readers.pickles import read_pickle

SOURCES = ("train", "test")


@dataclass(frozen=True, kw_only=True)
class CifarFiles(Published, ChannelNormalisation):
    """Base class: the folder of the source has the pickles of the training and test images."""

    name: ClassVar[str]
    train: ClassVar[tuple[str, ...]]
    test: ClassVar[tuple[str, ...]]
    key: ClassVar[str]
    classes: ClassVar[int]
    default_partition: ClassVar[str] = "dirichlet"

    def files(self) -> Arrays:
        """Return all images [60000, 3, 32, 32], training images first.

        torchvision's classes read only unchanged files, and load them into memory.
        """
        source = sources()[f"cifar{self.classes}"]
        folder = self.find(source.name)

        def read() -> Arrays:
            train = [self._read(folder / file) for file in self.train]
            test = [self._read(folder / file) for file in self.test]
            return join_splits(train, test)

        files = (*self.train, *self.test)
        return read_once(source.name, source, folder, files, read)

    def _read(self, path: Path) -> Arrays:
        with readable(path, f"a pickled dict with the keys data and {self.key}"):
            content = read_pickle(read_file(path))
            images = content["data"]
            labels = content[self.key]
            are_integers = isinstance(labels, np.ndarray) or all(type(label) is int for label in labels)
            if not are_integers:
                raise ValueError(f"{self.key} are no integers")
        shape = (3 * 32 * 32,)
        rows = validated_arrays(path, images, labels, shape, self.classes)
        return rows._replace(images=rows.images.reshape(-1, 3, 32, 32))

    def load(self) -> Dataset:
        """Return all images; `is_test` marks the test images, `source` is train or test, `index` the row in it."""
        images, labels, is_test, _ = self.files()
        columns = from_two_files(is_test, SOURCES) | self.normalisation(3)
        return Dataset.of(self.name, images, labels, num_classes=self.classes, **columns)


@dataclass(frozen=True, kw_only=True)
class Cifar10(CifarFiles):
    """CIFAR-10 (Krizhevsky 2009): 60,000 images of 32 x 32 in ten classes of 6,000 each; no licence is stated.

    From https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz, unpacked: `cifar-10-batches-py/data_batch_1` to
    `data_batch_5` and `test_batch`.
    """

    name: ClassVar[str] = "cifar10"
    train: ClassVar[tuple[str, ...]] = tuple(f"data_batch_{number}" for number in range(1, 6))
    test: ClassVar[tuple[str, ...]] = ("test_batch",)
    key: ClassVar[str] = "labels"
    classes: ClassVar[int] = 10


@dataclass(frozen=True, kw_only=True)
class Cifar100(CifarFiles):
    """CIFAR-100 (Krizhevsky 2009): 60,000 images of 32 x 32 in 100 classes; no licence is stated.

    From https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz, unpacked: `cifar-100-python/train` and `test`. Labels
    are the fine labels. FedDebias: mean=[.507,.487,.441] and std=[.267,.256,.276].
    """

    name: ClassVar[str] = "cifar100"
    train: ClassVar[tuple[str, ...]] = ("train",)
    test: ClassVar[tuple[str, ...]] = ("test",)
    key: ClassVar[str] = "fine_labels"
    classes: ClassVar[int] = 100
