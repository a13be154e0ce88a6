"""A look at a dataset: examples of every domain on one sheet."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from rayfed.core.errors import UsageError
from rayfed.data.dataset import Dataset

GAP, MARGIN = 2, 62  # pixels between images, and left of them for the domain's name


def save_contact_sheet(dataset: Dataset, path: str | Path, *, columns: int = 16, scale: int = 2) -> None:
    """Writes a PNG with a row per domain and `columns` examples in each, the classes in turn.

    Images must be uint8 [N, 1 or 3, height, width]; each pixel becomes `scale` x `scale`.

    Raises:
        UsageError: a dataset that is not of such images.
    """
    if dataset.images.dtype != np.uint8 or dataset.images.ndim != 4 or dataset.images.shape[1] not in (1, 3):
        found = f"{dataset.images.dtype} {list(dataset.images.shape)}"
        raise UsageError(f"contact sheet: {dataset.name} has {found}; expected uint8 [N, 1 or 3, height, width]")
    height, width = (scale * side for side in dataset.images.shape[2:])
    size = (MARGIN + columns * (width + GAP), len(dataset.domains) * (height + GAP))
    sheet = Image.new("RGB", size, "white")
    write = ImageDraw.Draw(sheet)
    for position, domain in enumerate(dataset.domains):
        top = position * (height + GAP)
        write.text((4, top + height // 2), domain, fill="black", anchor="lm")
        for column, row in enumerate(_in_turn(dataset, position)[:columns]):
            pixels = np.broadcast_to(dataset.images[row].transpose(1, 2, 0), (*dataset.images.shape[2:], 3))
            image = Image.fromarray(np.ascontiguousarray(pixels)).resize((width, height), Image.Resampling.NEAREST)
            sheet.paste(image, (MARGIN + column * (width + GAP), top))
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, optimize=True)


def _in_turn(dataset: Dataset, domain: int) -> np.ndarray:
    """The rows of a domain, one of each class, then again one of each."""
    rows = np.flatnonzero(dataset.domain == domain)
    labels = dataset.labels[rows]
    turn = np.zeros(len(rows), int)
    for label in np.unique(labels):
        turn[labels == label] = np.arange((labels == label).sum())
    return rows[np.lexsort((labels, turn))]
