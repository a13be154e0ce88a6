"""Readers for the files of the five domains of Digits-5; each returns training images first, then test images."""

import bz2
from pathlib import Path

import numpy as np
import scipy.io

from rayfed.core.errors import UsageError
from rayfed.data.readers import idx
from rayfed.data.readers.array_files import Arrays, join_splits, validated_arrays
from rayfed.data.readers.class_folders import walk
from rayfed.data.readers.decoding import open_image, resize_image, run_in_threads
from rayfed.data.readers.pickled import read_pickle

CLASSES = tuple("0123456789")
SIDES = ("train", "test")
PARTS = tuple(f"partitions/train_part{number}.pkl" for number in range(10))


def read_idx(folder: Path, files: list[str]) -> Arrays:
    """Read MNIST's IDX files in `raw`; images are [n, 28, 28]."""
    pairs = idx.read_pairs(folder / "raw")
    parts = [validated_arrays(folder / "raw", *pairs[source], (28, 28), 10) for source in idx.SOURCES]
    return join_splits(parts[:1], parts[1:])


def read_mat(folder: Path, files: list[str]) -> Arrays:
    """Read .mat files of SVHN and SynthDigits with X [32, 32, 3, n] and y [n, 1]; SVHN labels the digit zero as 10."""
    parts = [_mat(folder / file) for file in files]
    return join_splits(parts[:1], parts[1:])


def _mat(path: Path) -> Arrays:
    try:
        content = scipy.io.loadmat(path)
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: empty, truncated or damaged ({reason}); expected a .mat file of X and y") from error
    if not {"X", "y"} <= set(content):
        names = ", ".join(name for name in content if not name.startswith("__")) or "nothing"
        raise UsageError(f"{path}: has {names}; expected X [32, 32, 3, n] and y [n, 1]")
    images, labels = np.moveaxis(content["X"], -1, 0), content["y"].reshape(-1)
    are_integers = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and (labels % 1 == 0).all())
    labels = np.where(labels == 10, 0, labels).astype(np.int64) if are_integers else labels
    return validated_arrays(path, images, labels, (32, 32, 3), 10)


def read_usps(folder: Path, files: list[str]) -> Arrays:
    """Read USPS in LIBSVM's text format with bzip2: "label 1:value … 256:value", labels 1..10, values in [-1, 1]."""
    parts = [_usps(folder / file) for file in files]
    return join_splits(parts[:1], parts[1:])


def _usps(path: Path) -> Arrays:
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
    except (OSError, ValueError, EOFError) as error:  # UnicodeDecodeError is a ValueError
        raise UsageError(f"{path}: empty, truncated or damaged ({error}); expected bzip2 with lines of text") from error
    images, labels = np.empty((len(lines), 256), np.float32), np.empty(len(lines), np.int64)
    for number, line in enumerate(lines):
        label, *values = line.split() or [""]
        try:
            images[number] = np.array([float(value.partition(":")[2]) for value in values]).reshape(256)
            labels[number] = int(label) - 1
        except (ValueError, OverflowError) as error:
            form = "a label 1..10 and 256 values index:value"
            raise UsageError(f"{path}, line {number + 1}: {line[:60]!r}…; expected {form}") from error
    if not (np.abs(images) <= 1).all():
        raise UsageError(f"{path}: values {images.min()}..{images.max()}; expected -1..1")
    return validated_arrays(path, ((images + 1) / 2 * 255).astype(np.uint8).reshape(-1, 16, 16), labels, (16, 16), 10)


def read_fedbn(folder: Path, files: list[str]) -> Arrays:
    """Read FedBN's pickles of (images, labels); the last file has the test images, the others training images."""
    *train, test = [_pair(folder / file) for file in files]
    return join_splits(train, [test])


def _pair(path: Path) -> Arrays:
    expected = "a pickled pair of images and labels"
    content = read_pickle(path, expected)
    if not isinstance(content, (tuple, list)) or len(content) != 2:
        raise UsageError(f"{path}: contains {type(content).__name__}; expected {expected}")
    images, labels = content
    in_colour = isinstance(images, np.ndarray) and images.ndim == 4
    return validated_arrays(path, images, labels, (None, None, 3) if in_colour else (None, None), 10)


def read_folders(folder: Path, files: list[str]) -> Arrays:
    """Read the images in `train/0` … `train/9` and `test/0` … `test/9` that `list_folders` returns."""
    paths = [Path(file).parts for file in files]
    labels = np.array([int(digit) for _, digit, _ in paths])
    return Arrays(read_images(folder, files), labels, np.array([side == SIDES[1] for side, _, _ in paths]))


def list_folders(folder: Path) -> list[str]:
    """Return the images in `train/0` … `test/9`, training images first."""
    return [entry.file for side in SIDES for entry in walk(folder, {0: side}, CLASSES)]


def read_images(folder: Path, files: list[str]) -> np.ndarray:
    """Read image files, resized to squares as wide as the first one: uint8 [n, side, side, 3]."""
    first = open_image(folder / files[0])
    images = np.empty((len(files), first.width, first.width, 3), np.uint8)

    def read(row: int) -> None:
        images[row] = resize_image(open_image(folder / files[row]), first.width).transpose(1, 2, 0)

    run_in_threads(read, len(files), f"{folder.name}: reading images (only once)")
    return images
