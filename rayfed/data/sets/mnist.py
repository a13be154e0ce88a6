"""MNIST, Fashion-MNIST and EMNIST from their IDX files, in the folders that torchvision uses, and views of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.core.rng import generator
from rayfed.data.dataset import Dataset, from_two_files, index_within_group
from rayfed.data.dataset_options import ChannelNormalisation
from rayfed.data.published import Published, sources
from rayfed.data.readers.array_files import Arrays, join_splits, read_idx, read_once, validated_arrays

SOURCES = ("train", "t10k")
KINDS = ("images-idx3-ubyte", "labels-idx1-ubyte")
SPLITS = {"byclass": 62, "bymerge": 47, "balanced": 47, "letters": 26, "digits": 10, "mnist": 10}

Pool = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class IdxFiles(Published):
    """Base class: four IDX files, plain or as .gz, in the folder of `source`, which may be read-only.

    torchvision's classes read only unpacked files.
    """

    source: ClassVar[str] = "mnist"

    def idx_files(self) -> list[str]:
        """Return images and labels of the training and the test examples."""
        return [f"raw/{side}-{kind}" for side in SOURCES for kind in KINDS]

    def read_side(self, images: Path, labels: Path) -> Arrays:
        """Return the images [n, 28, 28] and labels of two files."""
        pixels = read_idx(images, dimensions=3)
        numbers = read_idx(labels, dimensions=1)
        return validated_arrays(labels, pixels, numbers, (28, 28), 10)

    def files(self) -> Arrays:
        """Return the images [N, 28, 28] and labels of all files, read once for all runs on this machine."""
        names = self.idx_files()
        source = sources()[self.source]
        folder = self.find(source.name, names)
        files = []
        for name in names:
            if (folder / name).is_file():
                files.append(name)
            else:
                files.append(f"{name}.gz")

        def read() -> Arrays:
            train = self.read_side(folder / files[0], folder / files[1])
            test = self.read_side(folder / files[2], folder / files[3])
            return join_splits([train], [test])

        return read_once(source.name, source, folder, files, read)

    def pool(self) -> Pool:
        """Return images [N, 1, 28, 28], labels [N], source codes [N] (0 train, 1 t10k) and rows in their files [N]."""
        images, labels, is_test, _ = self.files()
        source = is_test.astype(np.int8)
        return images[:, None], labels, source, index_within_group(source)


@dataclass(frozen=True, kw_only=True)
class Mnist(IdxFiles, ChannelNormalisation):
    """MNIST (LeCun, Cortes and Burges): 70,000 grey 28 x 28 images of ten digits, train and t10k pooled."""

    name: ClassVar[str] = "mnist"
    default_partition: ClassVar[str] = "dirichlet"
    channels: ClassVar[int | None] = 1
    sides: ClassVar[tuple[str, str]] = SOURCES

    @property
    def classes(self) -> int:
        """The number of classes."""
        return 10

    def load(self) -> Dataset:
        """Return all images; `is_test` marks t10k, `source` is train or t10k, `index` the row in that file."""
        images, labels, is_test, _ = self.files()
        columns = from_two_files(is_test, self.sides) | self.normalisation(1)
        return Dataset.of(self.name, images[:, None], labels, num_classes=self.classes, **columns)


@dataclass(frozen=True, kw_only=True)
class FashionMnist(Mnist):
    """Fashion-MNIST (Xiao, Rasul and Vollgraf 2017): 70,000 grey 28 x 28 images of clothes in ten classes."""

    name: ClassVar[str] = "fashion_mnist"
    source: ClassVar[str] = "fashion_mnist"


@dataclass(frozen=True, kw_only=True)
class Emnist(Mnist):
    """EMNIST (Cohen et al. 2017): 131,600 grey 28 x 28 images of 47 digits and letters in `split=balanced`.

    `<root>/EMNIST/gzip` has the files of NIST's gzip.zip, such as `emnist-balanced-train-images-idx3-ubyte.gz`, or
    `EMNIST/raw` has them unpacked, as torchvision does. NIST states no licence. The files hold the images transposed;
    here they stand upright. Other splits are byclass (814,255 images, 62 classes), bymerge, letters, digits and mnist.
    """

    split: str = option("balanced", choices=tuple(SPLITS), help="EMNIST's subset")

    name: ClassVar[str] = "emnist"
    source: ClassVar[str] = "emnist"
    sides: ClassVar[tuple[str, str]] = ("train", "test")

    @property
    def classes(self) -> int:
        return SPLITS[self.split]

    def idx_files(self) -> list[str]:
        home = sources()[self.source].home(self.root)
        place = "gzip"
        if (home / "raw").is_dir():
            place = "raw"
        start = f"{place}/emnist-{self.split}"
        return [f"{start}-{side}-{kind}" for side in self.sides for kind in KINDS]

    def read_side(self, images: Path, labels: Path) -> Arrays:
        numbers = read_idx(labels, dimensions=1).astype(np.int64)
        if self.split == "letters":
            numbers -= 1  # they count from 1
        pixels = read_idx(images, dimensions=3).swapaxes(1, 2)
        return validated_arrays(labels, pixels, numbers, (28, 28), self.classes)


def textured(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return |image - texture|, where each image has a texture of 5 x 5 random greys, interpolated bilinearly."""
    side = images.shape[-1]
    position = np.linspace(0, 4, side)
    distances = np.abs(position[:, None] - np.arange(5))
    weights = np.maximum(0, 1 - distances).astype(np.float32)  # bilinear, [side, 5]
    shape = (len(images), 1, 5, 5)
    greys = random.random(shape, dtype=np.float32)
    return np.abs(images - 255 * (weights @ greys @ weights.T))


def faint(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Reduce the contrast to a fifth and add normal noise with a standard deviation of a twentieth of the range."""
    noise = random.standard_normal(images.shape, dtype=np.float32)
    contrast = 0.2 * (images - np.float32(127.5))
    return 127.5 + contrast + 255 / 20 * noise


VIEWS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    "plain": lambda images, random: images,
    "inverted": lambda images, random: 255 - images,
    "turned": lambda images, random: np.rot90(images, axes=(2, 3)),  # counter-clockwise
    "textured": textured,
    "faint": faint,
}


@dataclass(frozen=True, kw_only=True)
class MnistViews(IdxFiles):
    """One domain per view: plain, inverted, turned by 90 degrees, textured, faint.

    Each image is in only one domain. The test examples of a domain come from the t10k images; mean and std are 0.5.
    """

    name: ClassVar[str] = "mnist_views"
    default_partition: ClassVar[str] = "domains"

    views: list[str] = option(list(VIEWS), choices=tuple(VIEWS), help="views to use, in this order")
    per_domain: int | None = option(None, low=1, help="maximum of training images per view; null: an equal share")
    tests_per_domain: int | None = option(None, low=1, help="maximum of test images per view; null: an equal share")
    size: int = option(28, choices=(28, 14), help="side of the images; 14: means of 2 x 2, computed before the view")
    seed: int = option(0, low=0, help="seed of the assignment of images to views, and of textures and noise")

    def load(self) -> Dataset:
        """Return the views one after the other, each with its training images before its test images."""
        images, labels, source, index = self.pool()
        random = generator(self.seed, f"{self.name}: views")
        order = random.permutation(len(labels))
        positions = range(len(self.views))
        parts = [self._rows(order, source, position) for position in positions]
        views = []
        for position, part in enumerate(parts):
            views.append(self._apply_view(images[part], position))
        rows = np.concatenate(parts)
        numbers = np.arange(len(parts), dtype=np.int16)
        domain = np.repeat(numbers, [len(part) for part in parts])
        columns = from_two_files(source[rows] == 1, SOURCES)
        columns |= {"index": index[rows], "mean": (0.5,), "std": (0.5,)}
        return Dataset.of(
            self.name,
            np.concatenate(views),
            labels[rows],
            num_classes=10,
            domain=domain,
            domains=tuple(self.views),
            **columns,
        )

    def _rows(self, order: np.ndarray, source: np.ndarray, position: int) -> np.ndarray:
        caps = (self.per_domain, self.tests_per_domain)
        shares = []
        for code in range(2):
            of_split = order[source[order] == code]
            shares.append(of_split[position :: len(self.views)])
        capped = []
        for share, cap in zip(shares, caps, strict=True):
            capped.append(share[:cap])
        return np.concatenate(capped)

    def _apply_view(self, images: np.ndarray, position: int) -> np.ndarray:
        if self.size == 28:
            resized = images
        else:
            resized = halve(images)
        view = self.views[position]
        random = generator(self.seed, f"{self.name}: textures and noise", view=view)
        values = VIEWS[view](resized, random)
        return np.rint(values).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class FashionMnistViews(MnistViews):
    """The same views of Fashion-MNIST."""

    name: ClassVar[str] = "fashion_mnist_views"
    source: ClassVar[str] = "fashion_mnist"


def halve(images: np.ndarray) -> np.ndarray:
    """Shrink images, uint8 [n, channels, 2h, 2w], to [n, channels, h, w] by means of 2 x 2 blocks, rounded half up."""
    wide = images.astype(np.uint16)
    upper = wide[..., ::2, ::2] + wide[..., ::2, 1::2]
    lower = wide[..., 1::2, ::2] + wide[..., 1::2, 1::2]
    total = upper + lower
    return ((total + 2) // 4).astype(np.uint8)
