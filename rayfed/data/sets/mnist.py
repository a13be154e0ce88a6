"""MNIST and Fashion-MNIST from their four IDX files, in the folders that torchvision uses."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, index_within_group
from rayfed.data.normalisation import per_channel
from rayfed.data.published import Published, obtain, sources
from rayfed.data.readers import idx
from rayfed.data.readers.array_files import Arrays, read_once
from rayfed.data.readers.files import datasets_folder


@dataclass(frozen=True, kw_only=True)
class IdxFiles(Published):
    """Base class: four IDX files in `<root>/<folder>/raw/`, plain or as .gz; the folder may be read-only."""

    folder: ClassVar[str] = "MNIST"  # also the name of torchvision's class, which lists the checksums
    source: ClassVar[str] = "mnist"

    def files(self) -> Arrays:
        """Return the images [N, 28, 28] and labels of train and t10k, read once for all runs on this machine.

        Raises:
            UsageError: Files are missing or damaged, or cannot be downloaded.
        """
        root = datasets_folder(self.root)
        raw = root / self.folder / "raw"
        if missing := [file for file in idx.FILES if file not in idx.present_files(raw)]:
            if not self.download:
                raise UsageError(
                    f"{raw}: no {', '.join(missing)} (plain or .gz); set data.download=true to download them, "
                    f"or data.root to the folder that contains {self.folder}/raw"
                )
            obtain(sources()[self.source], root / self.folder)
        files = list(idx.present_files(raw).values())
        return read_once(self.folder.lower(), raw, files, lambda: idx.read_all(raw), published=self.folder)

    def pool(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return images [N, 1, 28, 28], labels [N], source codes [N] (0 train, 1 t10k) and rows in their files [N].

        The images are read-only.
        """
        images, labels, is_test, _ = self.files()
        source = is_test.astype(np.int8)
        return images[:, None], labels, source, index_within_group(source)


@dataclass(frozen=True, kw_only=True)
class Mnist(IdxFiles):
    """MNIST (LeCun, Cortes and Burges): 70,000 grey 28 x 28 images of ten digits, train and t10k pooled.

    .gz files are compared with torchvision's checksums once, when they are read for the cache.
    """

    name: ClassVar[str] = "mnist"
    default_partition: ClassVar[str] = "dirichlet"

    mean: list[float] = option([0.5], help="subtracted from images in [0, 1]")
    std: list[float] = option([0.5], above=0, help="images are divided by it")

    def __post_init__(self) -> None:
        per_channel(self.mean, 1, where="data.mean")
        per_channel(self.std, 1, where="data.std")

    def load(self) -> Dataset:
        """Return all images; `is_test` marks t10k, `source` is train or t10k, `index` the row in that file."""
        images, labels, source, index = self.pool()
        return Dataset.of(
            self.name,
            images,
            labels,
            is_test=source == 1,
            num_classes=10,
            source=source,
            sources=idx.SOURCES,
            index=index,
            mean=tuple(self.mean),
            std=tuple(self.std),
        )


@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): 70,000 grey 28 x 28 images of clothes in ten classes."""

    name: ClassVar[str] = "fashion_mnist"
    folder: ClassVar[str] = "FashionMNIST"
    source: ClassVar[str] = "fashion_mnist"
