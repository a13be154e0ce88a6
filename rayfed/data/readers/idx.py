"""Reader for the IDX files of MNIST and related datasets, plain or gzipped."""

import contextlib
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError

SOURCES = ("train", "t10k")
FILES = tuple(f"{source}-{kind}" for source in SOURCES for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))


def find(folder: Path, file: str) -> Path | None:
    """Return the path of the file or of its gzipped form in `folder`, or None if neither exists."""
    for path in (folder / file, folder / f"{file}.gz"):
        if path.is_file():
            return path
    return None


def read_pairs(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return images, uint8 [n, height, width], and labels, uint8 [n], of "train" and "t10k"; all four files must exist.

    Raises:
        UsageError: A file is truncated, damaged, of another kind, or does not match its counterpart.
    """
    pairs = {}
    for source in SOURCES:
        image_path, label_path = (find(folder, f"{source}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
        if image_path is None or label_path is None:
            raise UsageError(f"{folder}: {source}-images-idx3-ubyte or {source}-labels-idx1-ubyte is missing")
        images, labels = read(image_path, dimensions=3), read(label_path, dimensions=1)
        if len(images) != len(labels):
            raise UsageError(f"{label_path}: {len(labels)} labels, but {image_path.name} has {len(images)} images")
        if labels.max(initial=0) > 9:
            raise UsageError(f"{label_path}: label {labels.max()}; expected 0..9")
        pairs[source] = images, labels
    return pairs


def read(path: Path, *, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with the given number of dimensions (3: images, 1: labels)."""
    content = _content(path)
    magic, header = 0x0800 + dimensions, 4 + 4 * dimensions  # 08 in the magic number stands for unsigned bytes
    if len(content) < header:
        raise UsageError(f"{path}: {len(content)} bytes; expected an IDX header of {header} bytes and the data")
    (actual_magic,) = struct.unpack(">I", content[:4])
    if actual_magic != magic:
        kind = "images" if dimensions == 3 else "labels"
        raise UsageError(f"{path}: starts with 0x{actual_magic:08x}; expected 0x{magic:08x}, an IDX file of {kind}")
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    size = int(np.prod(shape, dtype=object))  # Python integers, as a damaged header must not overflow
    if len(content) - header != size:
        actual_size, form = len(content) - header, " x ".join(map(str, shape))
        raise UsageError(f"{path}: {actual_size} bytes of data; expected {size} ({form}); download the file again")
    if size == 0:
        raise UsageError(f"{path}: contains no data ({shape[0]} entries); expected at least one")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def read_shape(path: Path, *, dimensions: int) -> tuple[int, ...]:
    """Return the shape in the header of an IDX file; if it does not match the file's length, `read` raises."""
    header = 4 + 4 * dimensions
    with open(path, "rb") as file:
        start, length = file.read(1 << 16), file.seek(0, os.SEEK_END)
        if path.suffix == ".gz" and length >= 4:
            file.seek(-4, os.SEEK_END)
            (length,) = struct.unpack("<I", file.read(4))  # gzip stores the length at the end, modulo 2**32
    with contextlib.suppress(zlib.error):
        start = zlib.decompressobj(wbits=31).decompress(start, header) if path.suffix == ".gz" else start[:header]
        if len(start) == header and start[:4] == struct.pack(">I", 0x0800 + dimensions):
            shape = struct.unpack(f">{dimensions}I", start[4:])
            if length == (header + math.prod(shape)) % 2**32 and math.prod(shape):
                return shape
    return read(path, dimensions=dimensions).shape


def _content(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    stream = zlib.decompressobj(wbits=31)  # 31: a gzip header and checksum
    try:
        plain = stream.decompress(content)
    except zlib.error as error:
        raise UsageError(f"{path}: damaged; expected a gzipped IDX file ({error}); download the file again") from error
    if not stream.eof:
        raise UsageError(
            f"{path}: truncated: its {len(content)} bytes contain only {len(plain)} bytes of IDX; "
            "expected a complete gzip stream; download the file again"
        )
    return plain
