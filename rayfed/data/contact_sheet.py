"""A contact sheet of a dataset: examples of every domain in one image."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from rayfed.core.errors import UsageError
from rayfed.core.file_names import writing
from rayfed.data.dataset import Dataset

GAP, MARGIN = 2, 62  # pixels between images, and of the left margin with the domain's name


def save_contact_sheet(dataset: Dataset, path: str | Path, *, columns: int = 16, scale: int = 2) -> None:
    """Write a PNG with one row per domain, in which the classes take turns.

    Args:
        dataset: A dataset with images uint8 [N, 1 or 3, height, width].
        path: The PNG file to write.
        columns: Examples per domain.
        scale: Pixels of the sheet per pixel of an image, in each direction.

    Raises:
        UsageError: The dataset does not consist of such images.
    """
    if dataset.images.dtype != np.uint8 or dataset.images.ndim != 4 or dataset.images.shape[1] not in (1, 3):
        actual = f"{dataset.images.dtype} {list(dataset.images.shape)}"
        raise UsageError(f"contact sheet: {dataset.name} has {actual}; expected uint8 [N, 1 or 3, height, width]")
    height, width = (scale * side for side in dataset.images.shape[2:])
    size = (MARGIN + columns * (width + GAP), len(dataset.domains) * (height + GAP))
    sheet = Image.new("RGB", size, "white")
    canvas = ImageDraw.Draw(sheet)
    for position, domain in enumerate(dataset.domains):
        top = position * (height + GAP)
        canvas.text((4, top + height // 2), domain, fill="black", anchor="lm")
        for column, row in enumerate(_rows_by_turns(dataset, position)[:columns]):
            pixels = np.broadcast_to(dataset.images[row].transpose(1, 2, 0), (*dataset.images.shape[2:], 3))
            image = Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(image, (MARGIN + column * (width + GAP), top))
    with writing(path):
        sheet.save(path, "png", optimize=True)


def _rows_by_turns(dataset: Dataset, domain: int) -> np.ndarray:
    """Return the rows of a domain so that the classes take turns."""
    rows = np.flatnonzero(dataset.domain == domain)
    labels = dataset.labels[rows]
    turns = np.zeros(len(rows), int)
    for label in np.unique(labels):
        turns[labels == label] = np.arange((labels == label).sum())
    return rows[np.lexsort((labels, turns))]
