"""Five small domains of digits, drawn from data in scikit-learn and matplotlib without any download."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import Dataset
from rayfed.data.dataset_options import DomainSelection
from rayfed.data.on_disk import Arrays, cached_arrays
from rayfed.data.sets.mnist_m import load_photographs

VERSION = 3  # raise it when the pixels change
DOMAINS = ("plain", "blended", "blurred", "street", "font")
HANDWRITTEN = DOMAINS[:4]
PER_DOMAIN = 449  # 1,797 handwritten digits over four domains


@dataclass(frozen=True, kw_only=True)
class MiniDomains(DomainSelection):
    """Base class of datasets that are drawn here: `most` images of each domain, every fifth of them for testing."""

    seed: int = option(0, low=0, help="seed of the assignment of digits to domains and of all drawing")
    per_domain: int | None = option(None, low=10, high=PER_DOMAIN, help="maximum of images per domain; null: all")

    embedded: ClassVar[bool] = True  # there are no files
    default_partition: ClassVar[str] = "domains"
    all_domains: ClassVar[tuple[str, ...]]
    most: ClassVar[int]
    classes: ClassVar[int]
    sources: ClassVar[tuple[str, ...]] = ("all",)

    def __post_init__(self) -> None:
        self.selected_domains()

    def available_domains(self) -> tuple[str, ...]:
        return self.all_domains

    def generate(self) -> Arrays:
        """Return images, uint8 [n, channels, height, width], labels and index of `most` images of each domain."""
        raise NotImplementedError

    def load(self) -> Dataset:
        """Return the selected domains one after the other; about a fifth of each prefix of a domain are test images."""
        domains = self.selected_domains()
        size = self.per_domain or self.most
        arrays = cached_arrays(self.name, {"version": VERSION, "seed": self.seed}, self.generate)
        rows_of = []
        for name in domains:
            first = self.all_domains.index(name) * self.most
            rows_of.append(np.arange(first, first + size))
        rows = np.concatenate(rows_of)
        images = np.array(arrays["images"][rows])
        is_font = [int(name == "font") for name in domains]
        half = (0.5,) * images.shape[1]
        numbers = np.arange(len(domains), dtype=np.int16)
        return Dataset.of(
            self.name,
            images,
            arrays["labels"][rows],
            is_test=rows % self.most % 5 == 4,
            num_classes=self.classes,
            domain=np.repeat(numbers, size),
            domains=domains,
            source=np.repeat(is_font, size),
            sources=self.sources,
            index=arrays["index"][rows],
            mean=half,
            std=half,
            ood=self.left_out,
        )


@dataclass(frozen=True, kw_only=True)
class MiniDigits(MiniDomains):
    """Digits in five domains similar to Digits-5, with 449 colour images of 28 x 28 each, a fifth of them for testing.

    The digits are scikit-learn's 1,797 handwritten digits of 8 x 8 (from UCI, Alpaydin and Kaynak 1998), each used in
    only one domain; the backgrounds come from scikit-learn's two photographs. "plain" is like MNIST, "blended" like
    MNIST-M and "blurred" like USPS. "street" is like SVHN: an image's neighbouring digits come from its own domain and
    its own side of the train/test split. "font" is like SynthDigits, printed in fonts that matplotlib ships.

    Labels are balanced to within one image per domain. `source` is "digits" (`index`: the row in load_digits) or
    "font". Mean and std are 0.5 per channel, as FedBN and ADCOL normalise Digits-5.
    """

    name: ClassVar[str] = "mini_digits"
    all_domains: ClassVar[tuple[str, ...]] = DOMAINS
    most: ClassVar[int] = PER_DOMAIN
    classes: ClassVar[int] = 10
    sources: ClassVar[tuple[str, ...]] = ("digits", "font")

    def generate(self) -> Arrays:
        """Generate all five domains: images, uint8 [2245, 3, 28, 28], their labels and index."""
        from sklearn.datasets import load_digits  # imported late: takes a second, and a cached dataset does not need it

        digits = load_digits()
        pictures = load_photographs(None)
        rows_of = split_rows(digits.target, numpy_generator(self.seed, 0))
        is_test = np.arange(PER_DOMAIN) % 5 == 4
        images: list[np.ndarray] = []
        for position, domain in enumerate(HANDWRITTEN):
            random = numpy_generator(self.seed, 1, position)
            domain_digits = digits.images[rows_of[position]]
            for row, digit in enumerate(domain_digits):
                if domain == "plain":
                    images.append(plain(digit))
                elif domain == "blended":
                    images.append(blended(digit, pictures, random))
                elif domain == "blurred":
                    images.append(blurred(digit, random))
                else:
                    of_its_side = np.flatnonzero(is_test == is_test[row])
                    left, right = domain_digits[random.choice(of_its_side, 2)]
                    images.append(street(digit, left, right, pictures, random))
        random = numpy_generator(self.seed, 1, DOMAINS.index("font"))
        printed = random.permutation(np.arange(PER_DOMAIN) % 10)
        images += [font(int(label), random) for label in printed]
        labels = [digits.target[rows] for rows in rows_of] + [printed]
        index = [*rows_of, np.arange(PER_DOMAIN)]
        return {
            "images": np.stack(images).transpose(0, 3, 1, 2),
            "labels": np.concatenate(labels).astype(np.int64),
            "index": np.concatenate(index).astype(np.int64),
        }


def split_rows(labels: np.ndarray, random: np.random.Generator) -> list[np.ndarray]:
    """Return disjoint, shuffled rows of load_digits for each handwritten domain, with classes as equal as possible."""
    shuffled = random.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    count = len(HANDWRITTEN)
    parts = []
    for domain in range(count):
        parts.append(by_class[domain::count])
    return [random.permutation(part[:PER_DOMAIN]) for part in parts]


SIDE = 28
FONTS = [
    *("Sans", "Sans-Bold", "Sans-Oblique", "SansMono"),
    *("SansMono-BoldOblique", "Serif", "Serif-BoldItalic", "Serif-Italic"),
]
Random = np.random.Generator


def plain(digit: np.ndarray) -> np.ndarray:
    """Draw a digit as in MNIST: white strokes on black, 20 pixels high, centred."""
    mask = centred(ink(digit, 20), SIDE)
    grey = mask[:, :, None]
    return as_pixels(np.repeat(grey, 3, axis=2))


def blended(digit: np.ndarray, photographs: list[np.ndarray], random: Random) -> np.ndarray:
    """Draw a digit as in MNIST-M (Ganin et al. 2016): |photograph - digit| in each channel."""
    mask = centred(ink(digit, 22), SIDE)
    background = patch(photographs, random)
    return as_pixels(np.abs(background - mask[:, :, None]))


def blurred(digit: np.ndarray, random: Random) -> np.ndarray:
    """Draw a digit as in USPS: slightly slanted, nearly filling 16 x 16 pixels, and enlarged so that it is blurred."""
    small = np.zeros((16, 16), np.float32)
    width = int(random.integers(10, 15))
    left = (16 - width) // 2
    strokes = resized(digit / 16, (width, 14), Image.Resampling.BILINEAR)
    small[1:15, left : left + width] = strokes
    slant = random.uniform(-0.25, 0.25)
    shear = (1, slant, -slant * 7.5, 0, 1, 0)
    upright = Image.fromarray(small)
    slanted = upright.transform((16, 16), Image.Transform.AFFINE, shear, Image.Resampling.BILINEAR)
    enlarged = resized(np.asarray(slanted), (SIDE, SIDE), Image.Resampling.BICUBIC)
    mask = enlarged.clip(0, 1)
    gamma = random.uniform(0.7, 1.1)
    grey = mask**gamma * random.uniform(0.8, 1.0)
    channel = grey[:, :, None]
    return as_pixels(np.repeat(channel, 3, axis=2))


def street(
    digit: np.ndarray, left: np.ndarray, right: np.ndarray, photographs: list[np.ndarray], random: Random
) -> np.ndarray:
    """Draw a digit as in SVHN: part of a house number with cropped neighbours, in one colour on a wall of another."""
    height = int(random.integers(19, 25))
    step = int(height * random.uniform(0.66, 0.8))
    canvas = np.zeros((3 * SIDE, 3 * SIDE), np.float32)
    middle = 3 * SIDE // 2
    shifts = ((left, -step), (right, step), (digit, 0))
    for neighbour, shift in shifts:
        if neighbour is digit or random.random() < 0.8:
            corner = middle - SIDE // 2
            window = canvas[corner:, corner + shift :][:SIDE, :SIDE]
            np.maximum(window, centred(ink(neighbour, height), SIDE), out=window)
    tilt = random.uniform(-8, 8)
    turned = Image.fromarray(canvas).rotate(tilt, Image.Resampling.BILINEAR)
    down, across = random.integers(-2, 3, size=2)
    top = middle - SIDE // 2
    cut = np.asarray(turned)[top + down :, top + across :]
    mask = cut[:SIDE, :SIDE]
    front, back = colours(random, contrast=0.25, faded=0.55)
    texture = patch(photographs, random) - 0.5
    wall = back + 0.25 * texture + gradient(random, 0.2)
    strokes = mask[:, :, None] * (front - wall)
    image = wall + strokes * random.uniform(0.85, 1.0)
    noise = random.normal(0, 0.02, image.shape)
    return smoothed(as_pixels(image + noise), random.uniform(0.3, 0.8))


def font(label: int, random: Random) -> np.ndarray:
    """Draw a digit as in SynthDigits: one of eight DejaVu fonts, any position, colour and tilt, a shaded background."""
    large = 4 * SIDE  # drawn large and then reduced, for smooth edges
    canvas = Image.new("L", (large, large))
    name = FONTS[random.integers(len(FONTS))]
    face = typeface(name, int(4 * random.integers(20, 28)))
    shift = random.uniform(-9, 9, size=2)
    right, down = shift.tolist()
    position = (large / 2 + right, large / 2 + down)
    ImageDraw.Draw(canvas).text(position, str(label), fill=255, font=face, anchor="mm")
    turned = canvas.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)
    reduced = turned.resize((SIDE, SIDE), Image.Resampling.BOX)
    mask = np.asarray(reduced, np.float32)[:, :, None] / 255
    front, back = colours(random, contrast=0.4)
    ground = back + gradient(random, 0.3)
    image = ground + mask * (front - ground)
    noise = random.normal(0, 0.03, image.shape)
    return smoothed(as_pixels(image + noise), random.uniform(0, 0.8))


def ink(digit: np.ndarray, height: int) -> np.ndarray:
    """Enlarge an 8 x 8 digit of values 0..16 to strokes [height, height] in [0, 1] with sharpened edges."""
    large = resized(digit / 16, (height, height), Image.Resampling.BICUBIC)
    return np.clip((large - 0.2) / 0.55, 0, 1)


def centred(mask: np.ndarray, side: int) -> np.ndarray:
    """Place `mask` on a square of zeros so that the bounding box of its strokes is centred."""
    framed = np.zeros((side, side), np.float32)
    rows = np.flatnonzero(mask.max(axis=1) > 0.3)
    columns = np.flatnonzero(mask.max(axis=0) > 0.3)
    if not len(rows) or not len(columns):
        return framed
    used_rows = slice(rows[0], rows[-1] + 1)
    used_columns = slice(columns[0], columns[-1] + 1)
    part = mask[used_rows, used_columns]
    top = (side - part.shape[0]) // 2
    left = (side - part.shape[1]) // 2
    height, width = part.shape
    framed[top : top + height, left : left + width] = part
    return framed


def resized(values: np.ndarray, size: tuple[int, int], method: Image.Resampling) -> np.ndarray:
    """Resize floats [h, w] to `size` (width, height)."""
    image = Image.fromarray(values.astype(np.float32))
    return np.asarray(image.resize(size, method))


def patch(photographs: list[np.ndarray], random: Random, side: int = SIDE) -> np.ndarray:
    """Return a random patch [side, side, ...] in [0, 1] of one of the photographs, uint8 [height, width, ...]."""
    photograph = photographs[random.integers(len(photographs))]
    height, width = photograph.shape[:2]
    top = int(random.integers(height - side + 1))
    left = int(random.integers(width - side + 1))
    cut = photograph[top : top + side, left : left + side]
    return cut / np.float32(255)


def colours(random: Random, *, contrast: float, faded: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Draw two colours whose brightness differs by at least `contrast`; `faded` is the share of grey mixed in."""
    weights = np.array([0.299, 0.587, 0.114])  # of red, green and blue in the perceived brightness
    while True:
        front, back = random.random((2, 3))
        if abs(weights @ (front - back)) >= contrast:
            greyed = []
            for colour in (front, back):
                grey = weights @ colour
                greyed.append(colour + faded * (grey - colour))
            return greyed[0], greyed[1]


def gradient(random: Random, strength: float) -> np.ndarray:
    """Return a gradient [28, 28, 1] in a random direction, within -strength / 2 and strength / 2."""
    angle = random.uniform(0, 2 * np.pi)
    places = np.indices((SIDE, SIDE))
    down, across = places / (SIDE - 1) - 0.5
    slope = np.sin(angle) * down + np.cos(angle) * across
    return (strength * random.random() * slope)[:, :, None]


def smoothed(pixels: np.ndarray, radius: float) -> np.ndarray:
    """Apply a Gaussian blur to `pixels`."""
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def as_pixels(values: np.ndarray) -> np.ndarray:
    """Convert floats in [0, 1] to uint8."""
    levels = np.rint(values.clip(0, 1) * 255)
    return levels.astype(np.uint8)


@cache
def typeface(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load a DejaVu font that matplotlib ships."""
    import matplotlib

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return ImageFont.truetype(str(folder / f"DejaVu{name}.ttf"), size)
