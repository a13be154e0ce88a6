"""Five small domains of digits, generated from data in scikit-learn and matplotlib without any download."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.data.cache import Arrays, cached_arrays
from rayfed.data.dataset import Dataset
from rayfed.data.domain_sampling import DomainSelection
from rayfed.data.draws import numpy_generator
from rayfed.data.sets import drawing
from rayfed.data.sets.mnist_m import load_photographs

VERSION = 2  # raise it when the pixels change
DOMAINS = ("plain", "blended", "blurred", "street", "font")
HANDWRITTEN = DOMAINS[:4]
PER_DOMAIN = 449  # 1,797 handwritten digits over four domains


@dataclass(frozen=True, kw_only=True)
class MiniDigits(DomainSelection):
    """Digits in five domains similar to Digits-5, with 449 colour images of 28 x 28 each, a fifth of them for testing.

    The digits are scikit-learn's 1,797 handwritten digits of 8 x 8 (from UCI, Alpaydin and Kaynak 1998), each used in
    only one domain; the backgrounds come from scikit-learn's two photographs. "plain" is like MNIST, "blended" like
    MNIST-M, "blurred" like USPS, "street" like SVHN (an image's neighbouring digits come from its own domain and its
    own side of the train/test split), and "font" like SynthDigits, printed in fonts that matplotlib ships.

    Labels are balanced to within one image per domain. `source` is "digits" (`index`: the row in load_digits) or
    "font". Mean and std are 0.5 per channel, as FedBN and ADCOL normalise Digits-5.
    """

    seed: int = option(0, low=0, help="seed of the assignment of digits to domains and of all drawing")
    per_domain: int | None = option(None, low=10, high=PER_DOMAIN, help="maximum of images per domain; null: 449")

    name: ClassVar[str] = "mini_digits"
    default_partition: ClassVar[str] = "domains"

    def __post_init__(self) -> None:
        self.selected_domains()

    def available_domains(self) -> tuple[str, ...]:
        return DOMAINS

    def load(self) -> Dataset:
        """Return the selected domains one after the other; about a fifth of each prefix of a domain are test images."""
        domains = self.selected_domains()
        arrays = cached_arrays(self.name, {"version": VERSION, "seed": self.seed}, lambda: generate(self.seed))
        size = self.per_domain or PER_DOMAIN
        rows = np.concatenate([DOMAINS.index(name) * PER_DOMAIN + np.arange(size) for name in domains])
        return Dataset.of(
            self.name,
            np.ascontiguousarray(arrays["images"][rows].transpose(0, 3, 1, 2)),
            arrays["labels"][rows],
            is_test=arrays["is_test"][rows],
            num_classes=10,
            domain=np.repeat(np.arange(len(domains), dtype=np.int16), size),
            domains=domains,
            source=arrays["source"][rows],
            sources=("digits", "font"),
            index=arrays["index"][rows],
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            ood=self.left_out,
        )


def generate(seed: int) -> Arrays:
    """Generate all five domains: images, uint8 [2245, 28, 28, 3], and their labels, is_test, source codes and index."""
    from sklearn.datasets import load_digits  # imported late: takes a second, and a cached dataset does not need it

    digits = load_digits()
    pictures = load_photographs(None)
    rows_of = split_rows(digits.target, numpy_generator(seed, 0))
    is_test = np.arange(PER_DOMAIN) % 5 == 4
    images: list[np.ndarray] = []
    labels = []
    for position, domain in enumerate(DOMAINS):
        random = numpy_generator(seed, 1, position)
        if domain == "font":
            printed = random.permutation(np.arange(PER_DOMAIN) % 10)
            labels.append(printed)
            images.extend(drawing.font(int(label), random) for label in printed)
            continue
        domain_digits = digits.images[rows_of[position]]
        labels.append(digits.target[rows_of[position]])
        for row, digit in enumerate(domain_digits):
            if domain == "plain":
                images.append(drawing.plain(digit, random))
            elif domain == "blended":
                images.append(drawing.blended(digit, pictures, random))
            elif domain == "blurred":
                images.append(drawing.blurred(digit, random))
            else:
                left, right = domain_digits[random.choice(np.flatnonzero(is_test == is_test[row]), 2)]
                images.append(drawing.street(digit, left, right, pictures, random))
    return {
        "images": np.stack(images),
        "labels": np.concatenate(labels).astype(np.int64),
        "is_test": np.tile(is_test, len(DOMAINS)),
        "source": np.repeat(np.array([0] * len(HANDWRITTEN) + [1], np.int8), PER_DOMAIN),
        "index": np.concatenate([*rows_of, np.arange(PER_DOMAIN)]).astype(np.int64),
    }


def split_rows(labels: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Return disjoint, shuffled rows of load_digits for each handwritten domain, with classes as equal as possible."""
    shuffled = random.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = len(HANDWRITTEN)
    return [random.permutation(by_class[domain::count][:PER_DOMAIN]) for domain in range(count)]
