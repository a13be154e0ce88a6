"""MNIST-M, generated from MNIST: Ganin et al. 2016, "Domain-Adversarial Training of Neural Networks", section 5.2.4.

    MNIST-M:  |photograph − digit| in each channel, with a random patch of a random photograph

Ganin et al. used the photographs of BSDS500; any folder of photographs works.
"""

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.paths import absolute, looked_in
from rayfed.core.rng import floor_share, generator
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import IMAGENET_MEAN, IMAGENET_STD, MEAN_HELP, STD_HELP, ChannelNormalisation
from rayfed.data.on_disk import array_hash, memory_mapped
from rayfed.data.readers.class_folders import EXPECTED, image_files
from rayfed.data.readers.decoding import open_image, resize_image
from rayfed.data.readers.files import tell_left_out
from rayfed.data.sets.mnist import SOURCES as MNIST_SOURCES
from rayfed.data.sets.mnist import IdxFiles

VERSION = 2  # raise it when the pixels change
SIDE = 28
BLOCK = 1024  # digits processed at a time
DOMAINS = ("mnist", "mnist_m")
SOURCES = (*MNIST_SOURCES, *(f"mnist_m/{source}" for source in MNIST_SOURCES))
TEST_SHARE = 0.1  # share of the digits used for testing


@dataclass(frozen=True, kw_only=True)
class MnistM(IdxFiles, ChannelNormalisation):
    """Two domains in colour, MNIST and MNIST-M, with the split of FRAug's Digits (Chen et al. 2023, appendix).

    The 70,000 digits are shuffled. A tenth, the same in both domains, is used for testing. Of the others, MNIST takes
    its `share` from the front and MNIST-M from the back. So they have no training digit in common if `share` is at
    most 0.5. The two versions of a digit form a leakage group: no partition trains on one and tests on the other.
    """

    name: ClassVar[str] = "mnist_m"
    default_partition: ClassVar[str] = "domains"

    share: float = option(1.0, above=0, high=1, help="share of the training digits to use; FRAug: 0.01")
    tests: int | None = option(None, low=1, help="maximum of test images per domain; null: 7000")
    size: int = option(32, choices=(28, 32), help="side of the images; 32: enlarged bilinearly from 28 x 28")
    photographs: str | None = option(None, help="folder of photographs (.jpg, .png); null: scikit-learn's two")
    mean: list[float] = option(IMAGENET_MEAN, help=MEAN_HELP)
    std: list[float] = option(IMAGENET_STD, above=0, help=STD_HELP)
    seed: int = option(0, low=0, help="seed of the choice of digits and of the patches of the photographs")

    def load(self) -> Dataset:
        """Return MNIST, then MNIST-M; `index` is the row of a digit in its file, `source` its file and domain."""
        digits, labels, source, index = self.pool()
        order = generator(self.seed, "mnist_m: digits").permutation(len(labels))
        test_pool = order[: floor_share(len(order), TEST_SHARE)]
        train_pool = order[len(test_pool) :]
        count = max(1, floor_share(len(train_pool), self.share))
        tests = test_pool[: self.tests]
        kept = []
        for train in (train_pool[:count], train_pool[-count:]):
            kept.append(np.concatenate([train, tests]))
        rows = np.concatenate(kept)
        size = count + len(tests)
        domain = np.repeat(np.arange(2, dtype=np.int16), size)
        is_test = np.arange(size) >= count
        return Dataset.of(
            self.name,
            self._images(digits, kept),
            labels[rows],
            is_test=np.tile(is_test, 2),
            num_classes=10,
            domain=domain,
            domains=DOMAINS,
            source=source[rows] + len(MNIST_SOURCES) * domain,
            sources=SOURCES,
            index=index[rows],
            leakage_group=rows,
            **self.normalisation(3),
        )

    def _images(self, digits: np.ndarray, kept: list[np.ndarray]) -> np.ndarray:
        """Return the images, uint8 [n, 3, size, size], read-only; a digit's patch depends on its row and the seed."""
        plain, merged = kept
        pictures = load_photographs(self.photographs)

        def fill(out: np.ndarray) -> None:
            for start in range(0, len(plain), BLOCK):
                rows_of_block = plain[start : start + BLOCK]
                block = digits[rows_of_block].repeat(3, axis=1)
                out[start : start + len(block)] = enlarged(block, self.size)
            positions = generator(self.seed, "mnist_m: patches").random((3, len(digits)))
            for start in range(0, len(merged), BLOCK):
                rows = merged[start : start + BLOCK]
                block = blended(digits[rows], pictures, *positions[:, rows])
                place = len(plain) + start
                out[place : place + len(rows)] = enlarged(block, self.size)

        made_of = array_hash(digits, *kept, *pictures)
        key = {"version": VERSION, "seed": self.seed, "made of": made_of}
        count = len(plain) + len(merged)
        shape = (count, 3, self.size, self.size)
        return memory_mapped(self.name, key, shape, "uint8", fill)


def blended(
    digits: np.ndarray, pictures: list[np.ndarray], picture: np.ndarray, top: np.ndarray, left: np.ndarray
) -> np.ndarray:
    """Compute |patch − digit| for `digits` [n, 1, 28, 28]: uint8 [n, 3, 28, 28].

    `picture`, `top` and `left` [n] in [0, 1) select a photograph and a position, relative to the number of choices.
    """
    images = np.empty((len(digits), 3, SIDE, SIDE), np.uint8)
    for row, digit in enumerate(digits):
        photograph = pictures[int(picture[row] * len(pictures))]
        high, wide = (side - SIDE + 1 for side in photograph.shape[:2])
        y = int(top[row] * high)
        x = int(left[row] * wide)
        patch = photograph[y : y + SIDE, x : x + SIDE]
        patch = patch.transpose(2, 0, 1)
        images[row] = np.abs(patch.astype(np.int16) - digit)
    return images


def load_photographs(folder: str | None) -> list[np.ndarray]:
    """Return the photographs in `folder`, uint8 [height, width, 3], sorted by name; None: the two of scikit-learn.

    Those of scikit-learn are halved in size, so that a patch of 28 pixels shows some structure and not only sky.
    UsageError if the folder has no photographs, or a photograph is damaged.
    """
    if folder is None:
        from sklearn.datasets import load_sample_images  # imported late: takes a second

        images = map(Image.fromarray, load_sample_images().images)
        return [np.asarray(image.reduce(2)) for image in images]
    root = absolute(folder)
    left_out = Counter[str]()
    paths = []
    for name in image_files(root, left_out):
        paths.append(root / name)
    if not paths:
        if root.is_dir():
            problem = f"contains no image; expected {EXPECTED}"
        else:
            problem = f"no such folder{looked_in(folder)}"
        raise UsageError(f"data.photographs={folder}: {problem}; use null for scikit-learn's")
    tell_left_out(root, left_out)
    return [np.asarray(open_image(path)) for path in paths]


def enlarged(images: np.ndarray, size: int) -> np.ndarray:
    """Resize images, uint8 [n, 3, 28, 28], to `size`."""
    if size == images.shape[-1]:
        return images
    resized = []
    for image in images:
        channels_last = Image.fromarray(image.transpose(1, 2, 0))
        resized.append(resize_image(channels_last, size))
    return np.stack(resized)
