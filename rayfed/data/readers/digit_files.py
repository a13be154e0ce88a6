"""The files that the five domains of Digits-5 come in; each reader gives training, then test images."""

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
    """MNIST's IDX files below `raw`; images [n, 28, 28]."""
    pairs = idx.read_pairs(folder / "raw")
    parts = [validated_arrays(folder / "raw", *pairs[source], (28, 28), 10) for source in idx.SOURCES]
    return join_splits(parts[:1], parts[1:])


def read_mat(folder: Path, files: list[str]) -> Arrays:
    """The .mat files of SVHN and SynthDigits, X [32, 32, 3, n] and y [n, 1], where SVHN calls the digit zero 10."""
    parts = [_mat(folder / file) for file in files]
    return join_splits(parts[:1], parts[1:])


def _mat(path: Path) -> Arrays:
    try:
        held = scipy.io.loadmat(path)
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: empty, cut short or damaged ({reason}); expected a .mat file of X and y") from error
    if not {"X", "y"} <= set(held):
        found = ", ".join(name for name in held if not name.startswith("__")) or "nothing"
        raise UsageError(f"{path}: has {found}; expected X [32, 32, 3, n] and y [n, 1]")
    images, labels = np.moveaxis(held["X"], -1, 0), held["y"].reshape(-1)
    whole = labels.dtype.kind in "iu" or (labels.dtype.kind == "f" and (labels % 1 == 0).all())
    labels = np.where(labels == 10, 0, labels).astype(np.int64) if whole else labels
    return validated_arrays(path, images, labels, (32, 32, 3), 10)


def read_usps(folder: Path, files: list[str]) -> Arrays:
    """USPS in LIBSVM's text form, bzip2-packed: "label 1:value … 256:value", labels 1..10, values in [-1, 1]."""
    parts = [_usps(folder / file) for file in files]
    return join_splits(parts[:1], parts[1:])


def _usps(path: Path) -> Arrays:
    try:
        lines = bz2.decompress(path.read_bytes()).decode("ascii").splitlines()
    except (OSError, ValueError, EOFError) as error:  # the decoding's error is a ValueError
        raise UsageError(f"{path}: empty, cut short or damaged ({error}); expected bzip2 with lines of text") from error
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
    """FedBN's pickles of (images, labels); the last is the test set, the others are training images."""
    *train, test = [_pair(folder / file) for file in files]
    return join_splits(train, [test])


def _pair(path: Path) -> Arrays:
    expected = "a pickled pair of images and labels"
    held = read_pickle(path, expected)
    if not isinstance(held, (tuple, list)) or len(held) != 2:
        raise UsageError(f"{path}: holds {type(held).__name__}; expected {expected}")
    in_colour = isinstance(held[0], np.ndarray) and held[0].ndim == 4
    return validated_arrays(path, held[0], held[1], (None, None, 3) if in_colour else (None, None), 10)


def read_folders(folder: Path, files: list[str]) -> Arrays:
    """Images in `train/0` … `train/9` and `test/0` … `test/9`, as `list_folders` names them."""
    places = [Path(file).parts for file in files]
    labels = np.array([int(digit) for _, digit, _ in places])
    return Arrays(read_images(folder, files), labels, np.array([side == SIDES[1] for side, _, _ in places]))


def list_folders(folder: Path) -> list[str]:
    """The images in `train/0` … `test/9`, training images first."""
    return [entry.file for side in SIDES for entry in walk(folder, {0: side}, CLASSES)]


def read_images(folder: Path, files: list[str]) -> np.ndarray:
    """uint8 [n, side, side, 3] of image files, all as wide as the first."""
    first = open_image(folder / files[0])
    images = np.empty((len(files), first.width, first.width, 3), np.uint8)

    def one(row: int) -> None:
        images[row] = resize_image(open_image(folder / files[row]), first.width).transpose(1, 2, 0)

    run_in_threads(one, len(files), f"{folder.name}: images read, once")
    return images
