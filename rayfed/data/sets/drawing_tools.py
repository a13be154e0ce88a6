"""What drawing a digit takes: strokes, places, colours, blur and letters."""

from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageFilter, ImageFont

SIDE = 28

Random = np.random.Generator


def ink(digit: np.ndarray, height: int) -> np.ndarray:
    """Strokes [height, height] in [0, 1] from an 8 x 8 digit of 0..16: enlarged, then the soft edges made steep."""
    large = resized(digit / 16, (height, height), Image.Resampling.BICUBIC)
    return np.clip((large - 0.2) / 0.55, 0, 1)


def centred(mask: np.ndarray, side: int) -> np.ndarray:
    """`mask` on a square of zeros, with the middle of its ink's columns and rows at the centre."""
    framed = np.zeros((side, side), np.float32)
    rows, columns = (np.flatnonzero(mask.max(axis=axis) > 0.3) for axis in (1, 0))
    if not len(rows) or not len(columns):
        return framed
    part = mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    top, left = (side - part.shape[0]) // 2, (side - part.shape[1]) // 2
    framed[top : top + part.shape[0], left : left + part.shape[1]] = part
    return framed


def resized(values: np.ndarray, size: tuple[int, int], method: Image.Resampling) -> np.ndarray:
    """Floats [h, w] at `size` (width, height)."""
    return np.asarray(Image.fromarray(values.astype(np.float32)).resize(size, method))


def patch(photographs: list[np.ndarray], random: Random) -> np.ndarray:
    """A random 28 x 28 x 3 piece, in [0, 1], of one of the photographs."""
    photograph = photographs[random.integers(len(photographs))]
    top, left = (int(random.integers(size - SIDE + 1)) for size in photograph.shape[:2])
    return photograph[top : top + SIDE, left : left + SIDE] / np.float32(255)


def colours(random: Random, *, contrast: float, faded: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Two colours whose brightness differs by at least `contrast`; `faded` 1 would leave only their greys."""
    weights = np.array([0.299, 0.587, 0.114])  # of red, green and blue in what the eye takes for brightness
    while True:
        front, back = random.random((2, 3))
        if abs(weights @ (front - back)) >= contrast:
            return tuple(colour + faded * (weights @ colour - colour) for colour in (front, back))


def gradient(random: Random, strength: float) -> np.ndarray:
    """A shade [28, 28, 1] that rises in a random direction from -strength / 2 to strength / 2 at most."""
    angle = random.uniform(0, 2 * np.pi)
    down, across = np.indices((SIDE, SIDE)) / (SIDE - 1) - 0.5
    return (strength * random.random() * (np.sin(angle) * down + np.cos(angle) * across))[:, :, None]


def smoothed(pixels: np.ndarray, radius: float) -> np.ndarray:
    """`pixels` after a Gaussian blur."""
    return np.asarray(Image.fromarray(pixels).filter(ImageFilter.GaussianBlur(radius)))


def as_pixels(values: np.ndarray) -> np.ndarray:
    """Floats in [0, 1] as uint8."""
    return np.rint(values.clip(0, 1) * 255).astype(np.uint8)


@cache
def typeface(name: str, size: int) -> ImageFont.FreeTypeFont:
    """One of the fonts that matplotlib ships."""
    import matplotlib

    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name), size)
