"""MNIST's four files in IDX format, written from images that a test makes."""

import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    """Return `array` as an IDX file of uint8."""
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_mnist(root: Path, train: np.ndarray, test: np.ndarray, name: str = "MNIST") -> Path:
    """Write uint8 images [n, 28, 28], labelled 0..9 in turn, to `root`/`name`/raw and return `root`."""
    raw = root / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, images in (("train", train), ("t10k", test)):
        labels = np.arange(len(images)) % 10
        (raw / f"{part}-images-idx3-ubyte").write_bytes(idx_bytes(images))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    return root
