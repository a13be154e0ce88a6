"""Photographs for the backgrounds of made data sets: a folder's, or the two that scikit-learn carries."""

from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.readers.class_folders import ENDINGS, image_files
from rayfed.data.readers.decoding import open_image


def load_photographs(folder: str | None, least: int) -> list[np.ndarray]:
    """uint8 [height, width, 3] of every photograph in `folder`, in the order of names; None: scikit-learn's, halved.

    Halved, so that a piece of 28 pixels shows some of the photograph's structure and not only sky.

    Raises:
        UsageError: a folder without photographs, a damaged one, or one with a side of less than `least` pixels.
    """
    if folder is None:
        from sklearn.datasets import load_sample_images  # late: a second to import

        return [np.asarray(Image.fromarray(image).reduce(2)) for image in load_sample_images().images]
    place = Path(folder).expanduser()
    paths = [place / name for name in image_files(place)] if place.is_dir() else []
    if not paths:
        raise UsageError(f"data.photographs={folder}: no {', '.join(ENDINGS)} in it; null: scikit-learn's")
    return [_opened(path, least) for path in paths]


def _opened(path: Path, least: int) -> np.ndarray:
    found = np.asarray(open_image(path))
    if min(found.shape[:2]) < least:
        raise UsageError(f"{path}: {found.shape[1]} x {found.shape[0]} pixels; needs {least} x {least} or more")
    return found
