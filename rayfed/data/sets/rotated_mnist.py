"""Rotated MNIST by two published recipes: FedDebias (one angle per client) and FL augmentation (six angles)."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import generator
from rayfed.data.cache import array_hash, cached_arrays
from rayfed.data.dataset import Dataset
from rayfed.data.lazy_rows import as_lazy_rows, select_rows
from rayfed.data.population import Examples, TestSet
from rayfed.data.readers import idx
from rayfed.data.rotation import halve, rotate
from rayfed.data.sets.mnist import IdxFiles

VERSION = 1  # raise it when the pixels change
TEN_ANGLES = tuple(range(0, 150, 15))
SIX_ANGLES = tuple(range(0, 90, 15))


@dataclass(frozen=True)
class RotationByClient:
    """The client view in which client i sees its images rotated by 15 (i mod 10) degrees."""

    size: int

    def domain(self, client: int) -> str:
        return angle_name(TEN_ANGLES[client % 10])

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        return rotated(images, TEN_ANGLES[client % 10], self.size)


@dataclass(frozen=True, kw_only=True)
class RotatedMnist(IdxFiles):
    """MNIST rotated counter-clockwise, bilinearly and with zeros outside of the image, in [0, 1] without normalisation.

    "feddebias": clients share the 60,000 training images, by default as in the paper (10 clients of equal size, class
    mix ~ Dirichlet(0.1 x class prior), 20 % held out for validation); client i sees its images rotated by 15 i degrees.
    The t10k images, rotated by each of the ten angles, are ten common test sets (split "test").

    "augmentation": all 70,000 images are shuffled, and image j gets angle j mod 6 of 0..75 degrees. There is one client
    per angle except `held_out`, which is the "ood" test set. A tenth of each client's images is for validation.

    With both recipes, the clients' own test parts are empty: FedDebias is scored on the common test sets, and the
    in-distribution score of FL augmentation is the unweighted mean of the five validation accuracies.
    """

    recipe: str = option("augmentation", choices=("feddebias", "augmentation"), help="which paper's Rotated MNIST")
    held_out: int = option(75, choices=SIX_ANGLES, help="augmentation: the angle that no client holds")
    per_domain: int | None = option(None, low=10, help="maximum of images per angle, or per common test set")
    size: int = option(28, choices=(28, 14), help="side of the images; 14: means of 2 x 2, computed after rotation")
    seed: int = option(0, low=0, help="seed of the images' angles (augmentation) and of the choice of images to keep")

    name: ClassVar[str] = "rotated_mnist"

    @property
    def default_partition(self) -> str:
        return "lda" if self.recipe == "feddebias" else "domains"

    @property
    def partition_defaults(self) -> dict[str, Any]:
        if self.recipe == "augmentation":
            return {}
        return {"clients": 10, "alpha": 0.1, "base": "prior", "validation": 0.2, "test": 0.0}

    def load(self) -> Dataset:
        """Return the images: already rotated for "augmentation", rotated by the client view for "feddebias"."""
        images, labels, source, index = self.pool()
        if images.shape[1:] != (1, 28, 28):
            raise UsageError(f"data=rotated_mnist: images of {images.shape[2]} x {images.shape[3]}; expected 28 x 28")
        order = generator(self.seed, "rotated_mnist").permutation(len(labels))
        if self.recipe == "feddebias":
            return self._feddebias(images, labels, source, index, order)
        return self._augmentation(images, labels, source, index, order)

    def _feddebias(self, images: Any, labels: Any, source: Any, index: Any, order: Any) -> Dataset:
        train = np.flatnonzero(source == 0)
        test = order[source[order] == 1][: self.per_domain]
        common = cached_arrays(
            "rotated_mnist-tests",
            {"version": VERSION, "size": self.size, "images": array_hash(images[test])},
            lambda: {angle_name(angle): rotated(images[test], angle, self.size) for angle in TEN_ANGLES},
        )
        return Dataset.of(
            self.name,
            select_rows(as_lazy_rows(images), train),
            labels[train],
            num_classes=10,
            sources=idx.SOURCES,
            index=index[train],
            tests=tuple(
                TestSet(angle_name(angle), "test", Examples(common[angle_name(angle)], labels[test]))
                for angle in TEN_ANGLES
            ),
            client_view=RotationByClient(self.size),
        )

    def _augmentation(self, images: Any, labels: Any, source: Any, index: Any, order: Any) -> Dataset:
        parts = [order[position :: len(SIX_ANGLES)][: self.per_domain] for position in range(len(SIX_ANGLES))]
        rows = np.concatenate(parts)

        def make() -> dict[str, np.ndarray]:
            pairs = zip(parts, SIX_ANGLES, strict=True)
            return {"images": np.concatenate([rotated(images[part], angle, self.size) for part, angle in pairs])}

        key = {"version": VERSION, "size": self.size, "parts": [len(part) for part in parts]}
        stored = cached_arrays("rotated_mnist-six", {**key, "images": array_hash(images[rows])}, make)
        return Dataset.of(
            self.name,
            stored["images"],
            labels[rows],
            num_classes=10,
            domain=np.repeat(np.arange(len(SIX_ANGLES), dtype=np.int16), [len(part) for part in parts]),
            domains=tuple(angle_name(angle) for angle in SIX_ANGLES),
            source=source[rows],
            sources=idx.SOURCES,
            index=index[rows],
            ood=(angle_name(self.held_out),),
        )


def angle_name(angle: int) -> str:
    """Return the name of an angle's domain, such as "75deg"."""
    return f"{angle}deg"


def rotated(images: np.ndarray, angle: int, size: int) -> np.ndarray:
    """Rotate `images` [n, 1, 28, 28] counter-clockwise by `angle` degrees and resize them to `size`."""
    full_size = rotate(images, angle) if angle else images
    return full_size if size == 28 else halve(full_size)
