"""Encoded images (PNG, JPEG, …) in a table column, decoded once into the cache."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.cache import memory_mapped
from rayfed.data.readers import tables
from rayfed.data.readers.decoding import check_depth, run_in_threads
from rayfed.data.readers.files import files_hash, readable

VERSION = 1  # raise it when the pixels change
BLOCK = 1024  # rows that are in memory at a time
GREY = ("1", "L", "LA", "I", "I;16", "F")


def is_image(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds encoded images: bytes, or the hub's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def decode_column(name: str, files: Sequence[Path], column: str, rows: int, size: int | None) -> np.ndarray:
    """Decode the images in a column of `files`: uint8 [rows, channels, height, width], read-only.

    The first image decides whether all are grey or RGB, and their height and width unless `size` is given: then all
    are resized bilinearly to squares. The array is cached for the files' names, sizes and modification times.

    Raises:
        UsageError: A row has no image or a damaged one, or without `size` one of another size than the first.
    """
    first = next((cell for path in files for cells in tables.batches(path, column, 1) for cell in _bytes(cells)), None)
    image = _opened(first, f"{files[0]}: row 0: column {column!r}")
    mode = "L" if image.mode in GREY else "RGB"
    width, height = (size, size) if size else image.size
    key = {
        "version": VERSION,
        "files": files_hash(Path("/"), [str(path.resolve()) for path in files]),
        "column": column,
        "size": size,  # None differs from the first image's size: images of other sizes are refused, not resized
        "mode": mode,
    }

    def fill(out: np.ndarray) -> None:
        start = 0
        for path in files:
            row = 0
            for cells in tables.batches(path, column, BLOCK):
                places = [f"{path}: row {row + position}: column {column!r}" for position in range(len(cells))]
                _decode(
                    out[start : start + len(cells)], _bytes(cells), places, mode, resize=size is not None, name=name
                )
                start, row = start + len(cells), row + len(cells)
        if start < rows:
            raise UsageError(f"{files[-1]}: {start} images in column {column!r}, but {rows} rows; the file is damaged")

    return memory_mapped(name, key, (rows, 1 if mode == "L" else 3, height, width), "uint8", fill)


def _bytes(cells: pa.Array) -> list[object]:
    """Return the bytes of each cell; None if it has none."""
    return (cells.field("bytes") if pa.types.is_struct(cells.type) else cells).to_pylist()


def _decode(
    out: np.ndarray, cells: Sequence[object], places: Sequence[str], mode: str, *, resize: bool, name: str
) -> None:
    shape = out.shape[-1], out.shape[-2]

    def decode(position: int) -> None:
        image = _opened(cells[position], places[position])
        if image.size != shape:
            if not resize:
                (width, height), (w, h) = image.size, shape
                raise UsageError(
                    f"{places[position]}: an image of {width} x {height}, but the first is {w} x {h}; "
                    "set data.size to resize all of them"
                )
            image = image.resize(shape, Image.Resampling.BILINEAR)
        pixels = np.asarray(image.convert(mode))
        out[position] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)

    run_in_threads(decode, len(cells), f"{name}: decoding images (only once)")


def _opened(cell: object, place: str) -> Image.Image:
    if not isinstance(cell, bytes) or not cell:
        raise UsageError(f"{place} has no image; expected its bytes")
    with readable(place, "an image"):
        image = Image.open(io.BytesIO(cell))
        image.load()
        check_depth(image, place)
    return image
