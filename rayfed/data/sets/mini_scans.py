"""A small segmentation task with five scanners, drawn from data in scikit-learn without any download."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from PIL import Image

from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.on_disk import Arrays
from rayfed.data.sets.mini_digits import MiniDomains, Random, as_pixels, ink, patch, smoothed
from rayfed.data.sets.mnist_m import load_photographs

SCANNERS = ("sharp", "hazy", "shaded", "textured", "striped")
PER_SCANNER = 359  # 1,797 handwritten digits over five scanners
SIDE = 32


@dataclass(frozen=True, kw_only=True)
class MiniScans(MiniDomains):
    """Strokes of handwriting to be found in grey images of 32 x 32 from five scanners, 359 each, a fifth for testing.

    Labels are masks [32, 32]: 1 where the strokes are, 0 elsewhere. The strokes are scikit-learn's 1,797 handwritten
    digits of 8 x 8 (from UCI, Alpaydin and Kaynak 1998). They are turned, enlarged and shifted at random, and each is
    used by only one scanner. Every image also shows two or three round blots of the same grey, which belong to the
    background.

    "sharp" has bright strokes on black. "hazy" has faint strokes on a bright, vignetted ground. "shaded" has strokes
    under a bias field, and noise that grows with the signal. "textured" has a photograph of scikit-learn as ground.
    "striped" is blurred and has stripes. Mean and std are 0.5.
    """

    per_domain: int | None = option(None, low=10, high=PER_SCANNER, help="maximum of images per scanner; null: all")

    name: ClassVar[str] = "mini_scans"
    all_domains: ClassVar[tuple[str, ...]] = SCANNERS
    most: ClassVar[int] = PER_SCANNER
    classes: ClassVar[int] = 2

    def generate(self) -> Arrays:
        """Generate all scanners: images, uint8 [1795, 1, 32, 32], masks, and each digit's row in load_digits."""
        from sklearn.datasets import load_digits  # imported late: takes a second, and a cached dataset does not need it

        digits = load_digits()
        photographs = load_photographs(None)
        grey = []
        for photograph in photographs:
            grey.append(Image.fromarray(photograph).convert("L"))
        grounds = [np.asarray(image) for image in grey]
        shuffled = numpy_generator(self.seed, 0).permutation(len(digits.target))
        order = shuffled[: len(SCANNERS) * PER_SCANNER]
        images = []
        masks = []
        for position, scanner in enumerate(SCANNERS):
            random = numpy_generator(self.seed, 1, position)
            for row in order[position * PER_SCANNER : (position + 1) * PER_SCANNER]:
                strokes = drawn(digits.images[row], random)
                images.append(scan(scanner, strokes, blots(strokes, random), grounds, random))
                masks.append(strokes > 0.5)
        labels = np.stack(masks).astype(np.int64)
        return {"images": np.stack(images)[:, None], "labels": labels, "index": order}


def drawn(digit: np.ndarray, random: Random) -> np.ndarray:
    """Return the strokes of a digit at a random size, angle and position, float [32, 32] in [0, 1]."""
    height = int(random.integers(18, 27))
    canvas = np.zeros((SIDE, SIDE), np.float32)
    top, left = random.integers(0, SIDE - height + 1, 2)
    place = slice(top, top + height), slice(left, left + height)
    canvas[place] = ink(digit, height)
    angle = random.uniform(-30, 30)
    turned = Image.fromarray(canvas).rotate(angle, Image.Resampling.BILINEAR)
    return np.asarray(turned)


def blots(strokes: np.ndarray, random: Random) -> np.ndarray:
    """Return two or three discs that leave the strokes free, float [32, 32] in [0, 1]."""
    down, across = np.indices((SIDE, SIDE))
    result = np.zeros((SIDE, SIDE), np.float32)
    for _ in range(random.integers(2, 4)):
        y = random.uniform(0, SIDE)
        x = random.uniform(0, SIDE)
        radius = random.uniform(2.5, 5.0)
        distance = np.hypot(down - y, across - x)
        blot = (radius + 0.5 - distance).clip(0, 1)
        result = np.maximum(result, blot)
    return result * (1 - strokes)


def scan(scanner: str, strokes: np.ndarray, blots: np.ndarray, grounds: list[np.ndarray], random: Random) -> np.ndarray:
    """Return the image of a scanner, uint8 [32, 32]."""
    shown = np.maximum(strokes, random.uniform(0.6, 1.0) * blots)
    noise = random.normal(0, 1, (SIDE, SIDE))
    places = np.indices((SIDE, SIDE))
    down, across = places / (SIDE - 1) - 0.5
    angle = random.uniform(0, 2 * np.pi)
    slope = np.sin(angle) * down + np.cos(angle) * across
    if scanner == "sharp":
        return as_pixels(random.uniform(0.7, 1.0) * shown + 0.04 * noise)
    if scanner == "hazy":
        brightest = random.uniform(0.4, 0.6)
        vignette = brightest - 0.5 * (down**2 + across**2)
        contrast = random.uniform(0.2, 0.35)
        return as_pixels(vignette + contrast * shown + 0.05 * noise)
    if scanner == "shaded":
        signal = (0.25 + 0.3 * shown) * (1 + slope)
        return as_pixels(signal * (1 + 0.15 * noise))
    if scanner == "textured":
        ground = patch(grounds, random, SIDE)
        return as_pixels(0.7 * ground + 0.3 * shown + 0.03 * noise)
    frequency = random.uniform(6, 9)
    phase = random.uniform(0, 2 * np.pi)
    stripes = 0.15 * np.sin(2 * np.pi * frequency * slope + phase)
    image = 0.35 + stripes + 0.35 * shown + 0.06 * noise
    return smoothed(as_pixels(image), 0.8)
