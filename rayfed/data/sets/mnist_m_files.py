"""Readers for the files of MNIST-M, and MNIST-M made from MNIST and a folder of photographs."""

from pathlib import Path

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.draws import numpy_generator
from rayfed.data.readers.array_files import Arrays, join_splits, validated_arrays
from rayfed.data.readers.digit_files import SIDES, read_idx, read_images
from rayfed.data.readers.photographs import load_photographs
from rayfed.data.readers.pickled import read_pickle
from rayfed.data.sets.mnist_m import SIDE, blended

KEYS = ("train", "valid", "test")


def read_pickled(folder: Path, files: list[str]) -> Arrays:
    """Read mnistm_data.pkl, a dict with the keys train, valid and test, and train_label, … for their labels."""
    path = folder / files[0]
    expected = f"a pickled dict with the keys {', '.join((*KEYS, *(f'{key}_label' for key in KEYS)))}"
    content = read_pickle(path, expected)
    if not isinstance(content, dict) or any(name not in content for key in KEYS for name in (key, f"{key}_label")):
        actual = ", ".join(map(str, content)) if isinstance(content, dict) else type(content).__name__
        raise UsageError(f"{path}: contains {actual}; expected {expected}")
    parts = [validated_arrays(path, content[key], content[f"{key}_label"], (None, None, 3), 10) for key in KEYS]
    return join_splits(parts[:2], parts[2:])


def read_tensors(folder: Path, files: list[str]) -> Arrays:
    """Read mnist_m_train.pt and mnist_m_test.pt, each a pair of tensors: images [n, 28, 28, 3] and labels [n]."""
    parts = [_tensors(folder / file) for file in files]
    return join_splits(parts[:1], parts[1:])


def _tensors(path: Path) -> Arrays:
    import torch  # imported late: other datasets need no torch to load

    expected = "a pair of tensors, images and labels, written by torch.save"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        arrays = [part.numpy() for part in content if torch.is_tensor(part)]
    except Exception as error:  # a damaged file can raise anything
        reason = " ".join(str(error).split())[:120]
        raise UsageError(f"{path}: empty, truncated or damaged ({reason}); expected {expected}") from error
    if not isinstance(content, (tuple, list)) or len(content) != 2 or len(arrays) != 2:
        raise UsageError(f"{path}: contains {type(content).__name__}; expected {expected}")
    return validated_arrays(path, arrays[0], arrays[1], (None, None, 3), 10)


def list_published(folder: Path) -> list[str]:
    """Return the two lists of labels and the images in them."""
    lists = [f"mnist_m_{side}_labels.txt" for side in SIDES]
    return [*lists, *(file for side in SIDES for file, _ in _labelled_files(folder, side))]


def read_published(folder: Path, files: list[str]) -> Arrays:
    """Read Ganin's folders mnist_m_train and mnist_m_test, with lists of lines such as "00000000.png 5"."""
    parts = [_labelled_files(folder, side) for side in SIDES]
    images = read_images(folder, files[len(SIDES) :])
    labels = np.array([label for part in parts for _, label in part])
    return Arrays(images, labels, np.arange(len(labels)) >= len(parts[0]))


def _labelled_files(folder: Path, side: str) -> list[tuple[str, int]]:
    path, entries = folder / f"mnist_m_{side}_labels.txt", []
    for number, line in enumerate(path.read_text(errors="replace").splitlines(), start=1):
        file, _, label = line.rpartition(" ")
        if not file or label not in set("0123456789"):
            raise UsageError(f"{path}, line {number}: {line[:60]!r}; expected a file name and a label 0..9")
        entries.append((f"mnist_m_{side}/{file}", int(label)))
    if not entries:
        raise UsageError(f"{path}: has no lines; expected one per image")
    return entries


def build(mnist: Path, folder: str) -> Arrays:
    """Make MNIST-M as |photograph − digit| (Ganin et al. 2016), in MNIST's order, with random photograph patches."""
    digits = read_idx(mnist, [])
    pictures = load_photographs(folder, SIDE)
    picture, top, left = numpy_generator(0).random((3, len(digits.labels)))
    images = blended(digits.images[:, None], pictures, picture, top, left)
    return digits._replace(images=images.transpose(0, 2, 3, 1))
