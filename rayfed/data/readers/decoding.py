"""Images in files, or encoded in a table column, as one array that is decoded once into the cache."""

import functools
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from PIL import Image, ImageOps

from rayfed.core.errors import UsageError
from rayfed.core.terminal import StatusLine
from rayfed.data.on_disk import Create, cached
from rayfed.data.readers import tables
from rayfed.data.readers.files import files_hash, inside, note, readable

VERSION = 3  # raise it when the pixels or the notes change
BLOCK = 64  # files per task of a thread

DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N", "F")
"""Pillow's modes with more than 8 bits per pixel."""
GREY = ("1", "L", "LA", "La", *DEEP)
_NOT_DECODED = ("BUFR", "EPS", "GRIB", "HDF5", "IPTC", "MPEG", "WMF")
"""Formats that Pillow recognises and does not decode. For EPS it would start Ghostscript, a program with a language."""


@functools.cache
def formats() -> tuple[str, ...]:
    """Return the formats that Pillow decodes by itself. It goes by the content of a file, whatever its name says."""
    Image.init()
    return tuple(sorted(set(Image.OPEN) - set(_NOT_DECODED)))


def decode_images(name: str, root: Path, files: Sequence[str], size: int) -> np.ndarray:
    """Decode `files` below `root` to RGB and resize them bilinearly to squares: uint8 [n, 3, size, size], read-only.

    The array is cached; later, only the folder and the files' names, sizes and modification times are checked.
    """
    for file in files:
        inside(root, file)

    def write(create: Create) -> None:
        images = create("images", (len(files), 3, size, size), "uint8")

        def decode(row: int) -> None:
            images[row] = resize_image(open_image(root / files[row]), size)

        run_in_threads(decode, len(files), f"{name}: decoding images (only once)")

    key = {"version": VERSION, "files": files_hash(root, files), "size": size}
    return cached(name, key, write)["images"]


def run_in_threads(work: Callable[[int], None], count: int, what: str) -> None:
    """Call `work(0)` to `work(count - 1)` in threads, with a status line; raise the first error in that order.

    Threads suffice, as Pillow releases the interpreter lock while it decodes and resizes.
    """

    def block(start: int) -> int:
        for row in range(start, min(start + BLOCK, count)):
            work(row)
        return min(start + BLOCK, count)

    with ThreadPoolExecutor(os.cpu_count()) as pool, StatusLine() as status:
        for done in pool.map(block, range(0, count, BLOCK)):
            status.show(f"{what}: {done:,} of {count:,}")


def decoded(image: Image.Image, where: str) -> Image.Image:
    """Return an opened image upright, grey (L) or in colour (RGB).

    Raises:
        UsageError: Pixels are not integers from 0 to 255.
    """
    if getattr(image, "is_animated", False) and image.format != "MPO":  # previews in a photograph
        note("some images have several frames, of which the first is read")
    image.load()
    ImageOps.exif_transpose(image, in_place=True)
    mode = "RGB"
    if image.mode in GREY:
        mode = "L"
    if image.mode in DEEP:  # Pillow cuts them off at 255, so that most of a 16-bit image would be white
        pixels = np.asarray(image)
        is_pixel = (pixels >= 0) & (pixels <= 255) & (pixels == np.floor(pixels))
        if not is_pixel.all():
            found = f"{pixels.dtype} from {pixels.min():g} to {pixels.max():g}"
            span = f"{found}; an image has integers from 0 to 255"
            raise UsageError(f"{where}: its pixels are {span}, so scale and save these with 8 bits first")
        info = image.info
        image = Image.fromarray(pixels.astype(np.uint8))
        if info.get("transparency", 256) < 256:
            image.info |= {"transparency": info["transparency"]}
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers)
        if np.asarray(layers)[..., 3].min() < 255:
            note("some images have transparent pixels, which are shown on white")
    return image.convert(mode)


def open_image(path: Path) -> Image.Image:
    """Open an image file as RGB."""
    with readable(path, "an image"), Image.open(path, formats=formats()) as opened:
        return decoded(opened, str(path)).convert("RGB")


def resize_image(image: Image.Image, size: int) -> np.ndarray:
    """Resize an RGB image bilinearly to a square: uint8 [3, size, size]."""
    if image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR)
    return np.asarray(image).transpose(2, 0, 1)


ROWS = 1024  # rows that are in memory at a time
Cell = tuple[str, object]  # where it is, and its bytes, if it has any


def is_image(kind: pa.DataType) -> bool:
    """Return whether a column of this type holds encoded images: bytes, or the hub's struct of bytes and path."""
    if pa.types.is_struct(kind):
        return kind.get_field_index("bytes") >= 0
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def decode_column(name: str, files: Sequence[Path], column: str, rows: int, size: int | None) -> np.ndarray:
    """Decode the images in a column of `files`: uint8 [rows, channels, height, width], read-only.

    The images are grey if each of them is, else RGB. With `size`, they are resized bilinearly to squares; else all must
    be as large as the first. The array is cached for the files' names, sizes and modification times.
    """

    def write(create: Create) -> None:
        cells = _cells(files, column)
        nothing = (f"{files[0]}: row 0: column {column!r}", None)
        place, first = next(cells, nothing)
        if size:
            width = size
            height = size
        else:
            width, height = _decoded(first, place).size
        all_cells = itertools.chain([(place, first)], cells)
        grey = all(_opened(cell, place).mode in GREY for place, cell in all_cells)
        channels = 3
        if grey:
            channels = 1
        images = create("images", (rows, channels, height, width), "uint8")
        cells = _cells(files, column)
        for start in range(0, rows, ROWS):
            block = list(itertools.islice(cells, ROWS))
            pixels = images[start : start + ROWS]
            _decode(pixels, block, resize=size is not None, name=name)

    paths = []
    for path in files:
        paths.append(str(path.resolve()))
    key = {
        "version": VERSION,
        "files": files_hash(Path("/"), paths),
        "column": column,
        "rows": rows,
        "size": size,
    }
    return cached(name, key, write)["images"]


def _cells(files: Sequence[Path], column: str) -> Iterator[Cell]:
    for path in files:
        row = 0
        for cells in tables.batches(path, column, ROWS):
            if pa.types.is_struct(cells.type):
                images = cells.field("bytes")
            else:
                images = cells
            for cell in images.to_pylist():
                yield f"{path}: row {row}: column {column!r}", cell
                row += 1


def _decode(out: np.ndarray, cells: Sequence[Cell], *, resize: bool, name: str) -> None:
    shape = (out.shape[-1], out.shape[-2])
    mode = "RGB"
    if out.shape[1] == 1:
        mode = "L"

    def decode(position: int) -> None:
        place, cell = cells[position]
        image = _decoded(cell, place)
        if image.size != shape:
            if not resize:
                (width, height) = image.size
                (w, h) = shape
                differs = f"an image of {width} x {height}, but the first is {w} x {h}"
                raise UsageError(f"{place}: {differs}; set data.size to resize all of them")
            image = image.resize(shape, Image.Resampling.BILINEAR)
        pixels = np.asarray(image.convert(mode))
        if mode == "L":
            out[position] = pixels[None]
        else:
            out[position] = pixels.transpose(2, 0, 1)

    run_in_threads(decode, len(cells), f"{name}: decoding images (only once)")


def _opened(cell: Any, place: str) -> Image.Image:
    """Return the image in a cell. Only its head is read yet."""
    with readable(place, "an image"):
        return Image.open(io.BytesIO(cell), formats=formats())


def _decoded(cell: object, place: str) -> Image.Image:
    image = _opened(cell, place)
    with readable(place, "an image"):
        return decoded(image, place)
