"""Helpers to draw digits: strokes, positions, colours, blur and fonts."""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageFont

SIDE = 28

Random = np.random.Generator


def ink(digit: np.ndarray, height: int) -> np.ndarray:
    """Enlarge an 8 x 8 digit of values 0..16 to strokes [height, height] in [0, 1] with sharpened edges."""
    large = resized(digit / 16, (height, height), Image.Resampling.BICUBIC)
    return np.clip((large - 0.2) / 0.55, 0, 1)


def centred(mask: np.ndarray, side: int) -> np.ndarray:
    """Place `mask` on a square of zeros so that the bounding box of its strokes is centred."""
    framed = np.zeros((side, side), np.float32)
    rows, columns = (np.flatnonzero(mask.max(axis=axis) > 0.3) for axis in (1, 0))
    if not len(rows) or not len(columns):
        return framed
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    top, left = (side - part.shape[0]) // 2, (side - part.shape[1]) // 2
    framed[top : top + part.shape[0], left : left + part.shape[1]] = part
    return framed


def resized(values: np.ndarray, size: tuple[int, int], method: Image.Resampling) -> np.ndarray:
    """Resize floats [h, w] to `size` (width, height)."""
    return np.asarray(Image.fromarray(values.astype(np.float32)).resize(size, method))


def patch(photographs: list[np.ndarray], random: Random) -> np.ndarray:
    """Return a random patch [28, 28, 3] in [0, 1] of one of the photographs."""
    photograph = photographs[random.integers(len(photographs))]
    top, left = (int(random.integers(size - SIDE + 1)) for size in photograph.shape[:2])
    return photograph[top : top + SIDE, left : left + SIDE] / np.float32(255)


def colours(random: Random, *, contrast: float, faded: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Draw two colours whose brightness differs by at least `contrast`; `faded` is the share of grey mixed in."""
    weights = np.array([0.299, 0.587, 0.114])  # of red, green and blue in the perceived brightness
    while True:
        front, back = random.random((2, 3))
        if abs(weights @ (front - back)) >= contrast:
            return tuple(colour + faded * (weights @ colour - colour) for colour in (front, back))


def gradient(random: Random, strength: float) -> np.ndarray:
    """Return a gradient [28, 28, 1] in a random direction, within -strength / 2 and strength / 2."""
    angle = random.uniform(0, 2 * np.pi)
    down, across = np.indices((SIDE, SIDE)) / (SIDE - 1) - 0.5
    return (strength * random.random() * (np.sin(angle) * down + np.cos(angle) * across))[:, :, None]


def smoothed(pixels: np.ndarray, radius: float) -> np.ndarray:
    """Apply a Gaussian blur to `pixels`."""
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def as_pixels(values: np.ndarray) -> np.ndarray:
    """Convert floats in [0, 1] to uint8."""
    return np.rint(values.clip(0, 1) * 255).astype(np.uint8)


@cache
def typeface(name: str, size: int) -> ImageFont.FreeTypeFont:
    """Load one of the fonts that matplotlib ships."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
