"""Rotated MNIST and CIFAR of FedDebias, and Rotated MNIST of FL augmentation."""

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.core.rng import generator, stream_seed
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import MEAN_HELP, STD_HELP
from rayfed.data.on_disk import array_hash, memory_mapped, select_rows
from rayfed.data.population import Examples, TestSet
from rayfed.data.sets.cifar import SOURCES, Cifar10, Cifar100, CifarFiles
from rayfed.data.sets.mnist import SOURCES as MNIST_SOURCES
from rayfed.data.sets.mnist import IdxFiles, Pool, halve

VERSION = 1  # raise it when the pixels change
TEN_ANGLES = tuple(range(0, 150, 15))
SIX_ANGLES = tuple(range(0, 90, 15))
_RECIPE = {"clients": 10, "alpha": 0.1, "validation": 0.2, "test": 0.0}  # of FedDebias


@dataclass(frozen=True)
class RotationByClient:
    """The client view in which client i sees its images rotated by 15 (i mod 10) degrees."""

    size: int

    def domain(self, client: int) -> str:
        return angle_name(TEN_ANGLES[client % 10])

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        return rotate(images, TEN_ANGLES[client % 10], self.size)


@dataclass(frozen=True, kw_only=True)
class RotatedMnist(IdxFiles):
    """MNIST rotated counter-clockwise, bilinearly and with zeros outside of the image, in [0, 1] without normalisation.

    "feddebias": clients share the 60,000 training images. The default is the paper's: 10 clients of equal size, class
    mix ~ Dirichlet(0.1 x class prior), 20 % held out for validation. Client i sees its images rotated by 15 i degrees.
    The t10k images, rotated by each of the ten angles, are ten common test sets (split "test").

    "augmentation": all 70,000 images are shuffled, and image j gets angle j mod 6 of 0..75 degrees. There is one client
    per angle but the last, which is the "ood" test set. A tenth of each client's images is for validation.

    With both recipes, the clients' own test parts are empty: FedDebias is scored on the common test sets, and the
    in-distribution score of FL augmentation is the unweighted mean of the five validation accuracies.
    """

    recipe: str = option("augmentation", choices=("feddebias", "augmentation"), help="which paper's Rotated MNIST")
    per_domain: int | None = option(None, low=10, help="maximum of images per angle, or per common test set")
    size: int = option(28, choices=(28, 14), help="side of the images; 14: means of 2 x 2, computed after rotation")
    seed: int = option(0, low=0, help="seed of the images' angles (augmentation) and of the choice of images to keep")

    name: ClassVar[str] = "rotated_mnist"

    @property
    def default_partition(self) -> str:
        if self.recipe == "feddebias":
            return "lda"
        return "domains"

    @property
    def partition_defaults(self) -> dict[str, Any]:
        if self.recipe == "feddebias":
            return {**_RECIPE, "base": "prior"}
        return {}

    def load(self) -> Dataset:
        """Return the images: already rotated for "augmentation", rotated by the client view for "feddebias"."""
        pool = self.pool()
        order = generator(self.seed, "rotated_mnist").permutation(len(pool[1]))
        if self.recipe == "feddebias":
            return self._feddebias(pool, order)
        return self._augmentation(pool, order)

    def _feddebias(self, pool: Pool, order: np.ndarray) -> Dataset:
        images, labels, source, index = pool
        train = np.flatnonzero(source == 0)
        test = order[source[order] == 1][: self.per_domain]
        tests = rotated_tests(self.name, images[test], labels[test], TEN_ANGLES, self.size)
        return Dataset.of(
            self.name,
            select_rows(images, train),
            labels[train],
            num_classes=10,
            sources=MNIST_SOURCES,
            index=index[train],
            tests=tests,
            client_view=RotationByClient(self.size),
        )

    def _augmentation(self, pool: Pool, order: np.ndarray) -> Dataset:
        images, labels, source, index = pool
        parts = []
        for position in range(len(SIX_ANGLES)):
            part = order[position :: len(SIX_ANGLES)]
            parts.append(part[: self.per_domain])
        rows = np.concatenate(parts)
        sizes = [len(part) for part in parts]

        def fill(out: np.ndarray) -> None:
            pairs = zip(parts, SIX_ANGLES, strict=True)
            turned = []
            for part, angle in pairs:
                turned.append(rotate(images[part], angle, self.size))
            out[:] = np.concatenate(turned)

        key = {"version": VERSION, "parts": sizes, "images": array_hash(images[rows])}
        shape = (len(rows), 1, self.size, self.size)
        names = tuple(map(angle_name, SIX_ANGLES))
        return Dataset.of(
            self.name,
            memory_mapped(f"{self.name}-six", key, shape, "uint8", fill),
            labels[rows],
            num_classes=10,
            domain=np.repeat(np.arange(len(SIX_ANGLES), dtype=np.int16), sizes),
            domains=names,
            source=source[rows],
            sources=MNIST_SOURCES,
            index=index[rows],
            ood=names[-1:],
        )


@dataclass(frozen=True)
class RotationMix:
    """The client view in which client i draws q ~ Dirichlet(alpha), and for each image a fixed angle from q.

    The angle is drawn by a hash of the image's pixels, keyed by the seed and the client. So it does not depend on the
    image's position. (With a linear checksum such as CRC-32, images that share an angle under one seed would share one
    under almost any other.)
    """

    angles: tuple[int, ...]
    alpha: float
    seed: int

    def mix(self, client: int) -> np.ndarray:
        """Return q, the share of each angle."""
        random = generator(self.seed, "rotated_cifar: mix", client=client)
        return random.dirichlet([self.alpha] * len(self.angles))

    def domain(self, client: int) -> str:
        if len(self.angles) == 1:
            return angle_name(self.angles[0])
        return "mixed"

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        key = stream_seed(self.seed, "rotated_cifar: angles", client=client).to_bytes(7, "big")
        hashes = []
        for image in images:
            digest = hashlib.blake2b(image.tobytes(), key=key, digest_size=6)
            hashes.append(digest.digest())
        integers = [int.from_bytes(digest, "big") for digest in hashes]
        draws = np.array(integers) / 2**48
        ends = np.cumsum(self.mix(client))
        angle_of = np.searchsorted(ends[:-1], draws, side="right")
        rotated = np.empty_like(images)
        for number, angle in enumerate(self.angles):
            rotated[angle_of == number] = rotate(images[angle_of == number], angle)
        return rotated


@dataclass(frozen=True, kw_only=True)
class RotatedCifar(CifarFiles):
    """Base class of both datasets; `angles=[0]` rotates nothing."""

    mean: list[float] = option([0.0], help=MEAN_HELP)
    std: list[float] = option([1.0], above=0, help=STD_HELP)
    angles: list[int] = option(list(TEN_ANGLES), low=0, below=360, help="angles of rotation, in degrees")
    angle_alpha: float = option(1.0, above=0, help="concentration of a client's mix of angles; FedDebias' code: 0.1")
    seed: int = option(0, low=0, help="seed of the mixes and of each image's angle")

    default_partition: ClassVar[str] = "lda"

    def load(self) -> Dataset:
        """Return the training images, which the client view rotates, and the common test sets."""
        images, labels, is_test, _ = self.files()
        count = int((~is_test).sum())
        angles = tuple(self.angles)
        return Dataset.of(
            self.name,
            images[:count],
            labels[:count],
            num_classes=self.classes,
            sources=SOURCES[:1],
            tests=rotated_tests(self.name, images[count:], labels[count:], angles, images.shape[-1]),
            client_view=RotationMix(angles, self.angle_alpha, self.seed),
            **self.normalisation(3),
        )


@dataclass(frozen=True, kw_only=True)
class RotatedCifar10(RotatedCifar, Cifar10):
    """CIFAR-10, rotated counter-clockwise (FedDebias, section 5.1), bilinearly and with zeros outside of the image.

    Clients share the 50,000 training images. The default is FedDebias's: 10 clients, class mix ~ Dirichlet(0.1 x class
    prior), 20 % held out for validation. Each client draws a mix of angles and rotates each image by an angle from it.
    The 10,000 test images, rotated by each of the angles, are common test sets (split "test"). angles=[0] is the clean
    CIFAR-10 of FedDebias' Table 6. Files and source are those of cifar10.
    """

    name: ClassVar[str] = "rotated_cifar10"
    partition_defaults: ClassVar[dict[str, Any]] = {**_RECIPE, "base": "prior"}


@dataclass(frozen=True, kw_only=True)
class RotatedCifar100(RotatedCifar, Cifar100):
    """CIFAR-100 (files of cifar100), rotated like `rotated_cifar10`; FedDebias' class mix is ~ Dirichlet(0.1) here."""

    name: ClassVar[str] = "rotated_cifar100"
    partition_defaults: ClassVar[dict[str, Any]] = {**_RECIPE, "base": "ones"}


def rotated_tests(
    name: str, images: np.ndarray, labels: np.ndarray, angles: tuple[int, ...], size: int
) -> tuple[TestSet, ...]:
    """Return one test set per angle, in which `images` [n, channels, side, side] are rotated by it."""

    def fill(out: np.ndarray) -> None:
        for number, angle in enumerate(angles):
            out[number] = rotate(images, angle, size)

    key = {"version": VERSION, "angles": angles, "images": array_hash(images)}
    shape = (len(angles), *images.shape[:2], size, size)
    rotated = memory_mapped(f"{name}-tests", key, shape, "uint8", fill)
    pairs = zip(angles, rotated, strict=True)
    tests = []
    for angle, x in pairs:
        tests.append(TestSet(angle_name(angle), "test", Examples(x, labels)))
    return tuple(tests)


def angle_name(angle: int) -> str:
    """Return the name of an angle's domain, such as "75deg"."""
    return f"{angle}deg"


def rotate(images: np.ndarray, degrees: float, size: int | None = None) -> np.ndarray:
    """Rotate images, uint8 [n, channels, side, side], counter-clockwise about their centre, and halve them to `size`.

    Interpolation is bilinear, with zeros outside of the image, and the result is rounded. The four source pixels of
    each target pixel and their weights are the same for all images, so they are computed once.
    """
    if degrees:
        rotated = _rotated(images, degrees)
    else:
        rotated = images
    if size in (None, images.shape[-1]):
        return rotated
    return halve(rotated)


def _rotated(images: np.ndarray, degrees: float) -> np.ndarray:
    side = images.shape[-1]
    angle = np.deg2rad(degrees)
    centre = (side - 1) / 2
    row, column = np.indices((side, side)) - centre
    # Rows count downwards, hence the signs: a counter-clockwise rotation looks pixels up clockwise.
    cos = np.cos(angle)
    sin = np.sin(angle)
    from_column = cos * column - sin * row + centre
    from_row = sin * column + cos * row + centre
    # Rounded so that quarter turns map pixels exactly onto pixels.
    from_row = np.round(from_row, 9)
    from_column = np.round(from_column, 9)
    top = np.floor(from_row).astype(int)
    left = np.floor(from_column).astype(int)
    down = from_row - top
    right = from_column - left
    tables = []
    corners = ((0, 0), (0, 1), (1, 0), (1, 1))
    for lower, later in corners:
        y = top + lower
        x = left + later
        from_above = 1 - down
        if lower:
            from_above = down
        from_left = 1 - right
        if later:
            from_left = right
        weight = from_above * from_left
        inside = (y >= 0) & (y < side) & (x >= 0) & (x < side)
        pixel = np.where(inside, y * side + x, 0)
        inner_weight = (weight * inside).astype(np.float32)
        tables.append((pixel.ravel(), inner_weight.ravel()))
    flat = images.reshape(-1, side * side)
    rotated = np.empty_like(flat)
    for start in range(0, len(flat), 4096):  # in blocks, so that the float copies stay small
        block = flat[start : start + 4096]
        total = sum(block[:, pixels] * weight for pixels, weight in tables)
        rotated[start : start + 4096] = np.rint(total)
    return rotated.reshape(images.shape)
