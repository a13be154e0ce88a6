"""Reader for the IDX files of MNIST and related datasets, plain or gzipped."""

import gzip
import struct
from pathlib import Path

import numpy as np

from rayfed.data.readers.array_files import Arrays, join_splits, validated_arrays
from rayfed.data.readers.files import readable

SOURCES = ("train", "t10k")
FILES = tuple(f"{source}-{kind}" for source in SOURCES for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))


def present_files(folder: Path) -> dict[str, str]:
    """Return those of `FILES` that `folder` contains, with the name of each: its own, or with .gz added."""
    names = {file: [name for name in (file, f"{file}.gz") if (folder / name).is_file()] for file in FILES}
    return {file: present[0] for file, present in names.items() if present}


def read_all(folder: Path) -> Arrays:
    """Return the images [n, 28, 28] and labels of all four files, those of t10k as test examples.

    torchvision's MNIST reads the same files, but only unpacked ones, and the folder may be read-only.

    Raises:
        UsageError: A file is truncated, damaged or of another kind, or does not match its counterpart.
    """
    paths = [folder / name for name in present_files(folder).values()]
    train, test = (
        validated_arrays(labels, read(images, dimensions=3), read(labels, dimensions=1), (28, 28), 10)
        for images, labels in (paths[:2], paths[2:])
    )
    return join_splits([train], [test])


def read(path: Path, *, dimensions: int) -> np.ndarray:
    """Return the uint8 array of an IDX file with the given number of dimensions (3: images, 1: labels)."""
    with readable(path, f"an IDX file of {'images' if dimensions == 3 else 'labels'}"):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        magic, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if magic != 0x0800 + dimensions:  # 08 stands for unsigned bytes
            raise ValueError(f"it starts with 0x{magic:08x}")
        return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
