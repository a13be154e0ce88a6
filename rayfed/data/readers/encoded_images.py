"""Encoded images (PNG, JPEG, …) in a table column, decoded once into the cache."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.cache import Create, cached
from rayfed.data.readers import tables
from rayfed.data.readers.decoding import GREY, decoded, run_in_threads, tell_changes
from rayfed.data.readers.files import files_hash, readable

VERSION = 2  # raise it when the pixels change
BLOCK = 1024  # rows that are in memory at a time


def is_image(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds encoded images: bytes, or the hub's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def decode_column(name: str, files: Sequence[Path], column: str, rows: int, size: int | None) -> np.ndarray:
    """Decode the images in a column of `files`: uint8 [rows, channels, height, width], read-only.

    All are grey if each is, else RGB. The first image decides their height and width unless `size` is given: then all
    are resized bilinearly to squares. The array is cached for the files' names, sizes and modification times.

    Raises:
        UsageError: A row has no image or a damaged one, or without `size` one of another size than the first.
    """

    def write(create: Create) -> None:
        cells = _cells(files, column)
        place, first = next(cells, (f"{files[0]}: row 0: column {column!r}", None))
        width, height = (size, size) if size else _opened(first, place)[0].size
        grey = all(_mode(cell, place) in GREY for place, cell in itertools.chain([(place, first)], cells))
        changes = create("changes", (rows,), "uint8")
        images = create("images", (rows, 1 if grey else 3, height, width), "uint8")
        cells, start = _cells(files, column), 0
        while block := list(itertools.islice(cells, BLOCK)):
            end = start + len(block)
            _decode(images[start:end], changes[start:end], block, resize=size is not None, name=name)
            start = end
        if start < rows:
            raise UsageError(f"{files[-1]}: {start} images in column {column!r}, but {rows} rows; the file is damaged")

    key = {
        "version": VERSION,
        "files": files_hash(Path("/"), [str(path.resolve()) for path in files]),
        "column": column,
        "rows": rows,
        "size": size,  # None differs from the first image's size: images of other sizes are refused, not resized
    }
    arrays = cached(name, key, write)
    tell_changes(f"{files[0]}: column {column!r}", arrays["changes"])
    return arrays["images"]


def _cells(files: Sequence[Path], column: str) -> Iterator[tuple[str, object]]:
    """Yield the place of each cell, and its bytes; None if it has none."""
    for path in files:
        row = 0
        for cells in tables.batches(path, column, BLOCK):
            images = cells.field("bytes") if pa.types.is_struct(cells.type) else cells
            for cell in images.to_pylist():
                yield f"{path}: row {row}: column {column!r}", cell
                row += 1


def _decode(
    out: np.ndarray, changes: np.ndarray, cells: Sequence[tuple[str, object]], *, resize: bool, name: str
) -> None:
    shape, mode = (out.shape[-1], out.shape[-2]), "L" if out.shape[1] == 1 else "RGB"

    def decode(position: int) -> None:
        place, cell = cells[position]
        image, changes[position] = _opened(cell, place)
        if image.size != shape:
            if not resize:
                (width, height), (w, h) = image.size, shape
                raise UsageError(
                    f"{place}: an image of {width} x {height}, but the first is {w} x {h}; "
                    "set data.size to resize all of them"
                )
            image = image.resize(shape, Image.Resampling.BILINEAR)
        pixels = np.asarray(image.convert(mode))
        out[position] = pixels[None] if mode == "L" else pixels.transpose(2, 0, 1)

    run_in_threads(decode, len(cells), f"{name}: decoding images (only once)")


def _mode(cell: object, place: str) -> str:
    """Return the mode of an image, of which only the head is read."""
    with readable(place, "an image"):
        return Image.open(_stream(cell, place)).mode


def _opened(cell: object, place: str) -> tuple[Image.Image, int]:
    with readable(place, "an image"):
        return decoded(Image.open(_stream(cell, place)), place)


def _stream(cell: object, place: str) -> io.BytesIO:
    if not isinstance(cell, bytes) or not cell:
        raise UsageError(f"{place} has no image; expected its bytes")
    return io.BytesIO(cell)
