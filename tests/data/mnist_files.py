"""MNIST's four files, from images of a test's own making."""

import struct
from pathlib import Path

import numpy as np


def write_mnist(root: Path, train: np.ndarray, test: np.ndarray) -> Path:
    """Writes uint8 images [n, 28, 28] to `root`/MNIST/raw, the labels 0..9 in turn; returns `root`."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, images in (("train", train), ("t10k", test)):
        head = struct.pack(">4I", 0x803, len(images), 28, 28)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        labels = (np.arange(len(images)) % 10).astype(np.uint8)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2I", 0x801, len(images)) + labels.tobytes())
    return root
