"""MNIST or Fashion-MNIST with a different view in each domain: feature skew too strong for one shared model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import generator
from rayfed.data.dataset import Dataset
from rayfed.data.readers import idx
from rayfed.data.sets.mnist import IdxFiles
from rayfed.data.sets.rotated import halve


def plain(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return the images unchanged."""
    return images


def inverted(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Invert the images: black on white."""
    return 255 - images


def turned(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Rotate by 90 degrees, counter-clockwise."""
    return np.rot90(images, axes=(2, 3))


def textured(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Return |image - texture|, where each image has a texture of 5 x 5 random greys, interpolated bilinearly."""
    side = images.shape[-1]
    position = np.linspace(0, 4, side)
    weights = np.maximum(0, 1 - np.abs(position[:, None] - np.arange(5))).astype(np.float32)  # bilinear, [side, 5]
    greys = random.random((len(images), 1, 5, 5), dtype=np.float32)
    return np.abs(images - 255 * (weights @ greys @ weights.T))


def faint(images: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Reduce the contrast to a fifth and add normal noise with a standard deviation of a twentieth of the range."""
    noise = random.standard_normal(images.shape, dtype=np.float32)
    return 127.5 + 0.2 * (images - np.float32(127.5)) + 255 / 20 * noise


VIEWS: dict[str, Callable[[np.ndarray, np.random.Generator], np.ndarray]] = {
    view.__name__: view for view in (plain, inverted, turned, textured, faint)
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

    def __post_init__(self) -> None:
        if not self.views or len(set(self.views)) < len(self.views):
            raise UsageError(f"data.views={self.views}: expected at least one view, each once")

    def load(self) -> Dataset:
        """Return the views one after the other, each with its training images before its test images."""
        images, labels, source, index = self.pool()
        order = generator(self.seed, f"{self.name}: views").permutation(len(labels))
        parts = [self._rows(order, source, position) for position in range(len(self.views))]
        views = [self._apply_view(images[part], position) for position, part in enumerate(parts)]
        rows = np.concatenate(parts)
        return Dataset.of(
            self.name,
            np.concatenate(views),
            labels[rows],
            is_test=source[rows] == 1,
            num_classes=10,
            domain=np.repeat(np.arange(len(parts), dtype=np.int16), [len(part) for part in parts]),
            domains=tuple(self.views),
            source=source[rows],
            sources=idx.SOURCES,
            index=index[rows],
            mean=(0.5,),
            std=(0.5,),
        )

    def _rows(self, order: np.ndarray, source: np.ndarray, position: int) -> np.ndarray:
        caps = (self.per_domain, self.tests_per_domain)
        shares = [order[source[order] == code][position :: len(self.views)] for code in range(2)]
        return np.concatenate([share[:cap] for share, cap in zip(shares, caps, strict=True)])

    def _apply_view(self, images: np.ndarray, position: int) -> np.ndarray:
        resized = images if self.size == 28 else halve(images)
        view = self.views[position]
        values = VIEWS[view](resized, generator(self.seed, f"{self.name}: textures and noise", view=view))
        return np.rint(values).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True, kw_only=True)
class FashionMnistViews(MnistViews):
    """The same views of Fashion-MNIST."""

    name: ClassVar[str] = "fashion_mnist_views"
    folder: ClassVar[str] = "FashionMNIST"
    source: ClassVar[str] = "fashion_mnist"
