"""Whatever is wrong with a set of images, one line names the file and what was expected."""

import bz2
import os
import re
import shutil

import numpy as np
import pytest
import scipy.io
import torch
from PIL import Image

from helpers import image_sets
from helpers.image_sets import WRITERS, options, picture
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.data.sets import DATASETS
from rayfed.data.sets.image_folders import ImageFolder


def refused(name, root, **others) -> str:
    with pytest.raises(UsageError) as caught:
        resolve(name, DATASETS, where="data")(**options(name, root, **others)).load()
    return str(caught.value)


@pytest.mark.parametrize("name", WRITERS)
def test_a_missing_folder_says_what_was_expected_and_where_it_comes_from(name, tmp_path):
    message = refused(name, tmp_path)
    assert str(tmp_path) in message
    assert "no such folder; expected " in message
    if name != "imagefolder":
        assert "; from http" in message
        assert "data.root is the folder that contains it" in message


IMAGES = {
    "tiny_imagenet": "tiny-imagenet-200/val/images/val_1.JPEG",
    "camelyon17": "camelyon17_v1.0/patches/patient_040_node_1/patch_patient_040_node_1_x_32_y_64.png",
    "rxrx1": "rxrx1_v1.0/images/HUVEC-02/Plate1/B03_s2.png",
    "imagefolder": "own/night/eel/4.png",
}
ARRAY_FILES = [
    ("cifar10", "cifar-10-batches-py/data_batch_2"),
    *(("digits5", "SVHN/test_32x32.mat"), ("digits5", "USPS/usps.bz2"), ("digits5", "MNIST_M/mnist_m_train.pt")),
    ("digits5", "MNIST/raw/train-images-idx3-ubyte"),
]
DAMAGES = {
    "empty": lambda whole: b"",
    "cut": lambda whole: whole[: len(whole) // 2],
    "text": lambda whole: b"<html>not found</html>",
}


@pytest.fixture
def written(roots):
    """A set in its published form, to be damaged: a copy for each test."""
    return lambda name, target: shutil.copytree(roots(name), target, dirs_exist_ok=True)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize(("name", "file"), [*IMAGES.items(), *ARRAY_FILES])
def test_a_damaged_file_is_named(name, file, damage, written, tmp_path):
    path = written(name, tmp_path) / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    message = refused(name, tmp_path)
    assert message.startswith(f"{path}: ")
    assert name not in IMAGES or "empty, truncated, damaged or not an image" in message


@pytest.mark.parametrize(
    ("pixels", "facts"),
    [
        (np.arange(256, dtype=np.uint16).reshape(16, 16) * 256, "uint16 from 0 to 65280"),
        (np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16), "float32 from 0 to 1"),
    ],
)
def test_pixels_that_8_bits_do_not_hold(pixels, facts, tmp_path):
    """Pillow would cut them off at 255, so that most of a 16-bit image would be white."""
    kept = np.arange(256).reshape(16, 16)
    for folder in "ab":
        (tmp_path / folder).mkdir()
        Image.fromarray(kept.astype(np.uint16)).save(tmp_path / folder / "1.png")
    dataset = ImageFolder(folder=str(tmp_path), size=16)
    assert (dataset.load().images[0] == kept).all()
    Image.fromarray(pixels).save(tmp_path / "a" / "2.tif")
    with pytest.raises(UsageError, match=rf"2\.tif: its pixels are {facts}; .* save these with 8 bits first"):
        dataset.load()


def renamed(path, new):
    path.rename(path.with_name(new))


def emptied(path):
    shutil.rmtree(path)
    path.mkdir()


OH, TABLE, TINY = "OfficeHomeDataset_10072016", "camelyon17_v1.0/metadata.csv", "tiny-imagenet-200"
FOLDERS = [
    ("pacs", "PACS/kfold/photo/dog", lambda p: renamed(p, "god"), ["photo: no class folder dog", "expected 7: dog"]),
    ("pacs", "PACS/kfold/photo/cow", os.mkdir, ["photo: cow is no class; expected 7"]),
    ("pacs", "PACS/kfold/sketch/1.png", picture, ["sketch/1.png: an image without a label"]),
    ("pacs", "PACS/kfold/sketch/dog", emptied, ["sketch/dog: contains no image", ".png"]),
    ("office_home", f"{OH}/Art/Thing_03", shutil.rmtree, ["Art: 64 class folders", "expected 65"]),
    ("imagefolder", "own", emptied, ["no images in folders"]),
    ("camelyon17", TABLE, os.unlink, ["metadata.csv: missing", "tumor, center"]),
    ("digits5", "SVHN/test_32x32.mat", os.unlink, ["SVHN: no test_32x32.mat; expected", "from http"]),
]


@pytest.mark.parametrize(("name", "file", "damage", "facts"), FOLDERS)
def test_wrong_folders_are_named(name, file, damage, facts, written, tmp_path):
    damage(written(name, tmp_path) / file)
    message = refused(name, tmp_path)
    assert str(tmp_path) in message
    for fact in facts:
        assert fact in message


@pytest.mark.parametrize(
    ("name", "file", "old", "new", "words"),
    [
        ("tiny_imagenet", f"{TINY}/wnids.txt", "n00000200", "n00000199", "199 different classes"),
        ("tiny_imagenet", f"{TINY}/val/val_annotations.txt", "n00000197", "tench", "an image and its class"),
        ("camelyon17", TABLE, ",tumor,", ",cancer,", "columns x_coord, .*tumor"),
        ("camelyon17", TABLE, ",64,1,", ",64,2,", "label 2, but there are 2 classes"),
        ("camelyon17", TABLE, ",64,", ",65,", "y_65.png: missing"),
    ],
)
def test_damaged_lists_are_one_line(name, file, old, new, words, written, tmp_path):
    path = written(name, tmp_path) / file
    path.write_text(path.read_text().replace(old, new))
    assert re.search(words, refused(name, tmp_path))


BATCH = image_sets.cifar_batch(4, "labels", 10)


def matlab(path, **arrays):
    scipy.io.savemat(path, arrays)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)


IMAGE, LABELS = np.zeros((32, 32, 3, 4), np.uint8), np.arange(4)
USPS = image_sets.usps_line(3, np.zeros(256))
ARRAYS = [
    *(("cifar10", "cifar-10-batches-py/test_batch", *case) for case in [
        (lambda p: image_sets.pickled(p, [1, 2]), ["not a pickled dict with the keys data and labels"]),
        (lambda p: image_sets.pickled(p, {**BATCH, "data": BATCH["data"][:, :768]}), ["uint8 [4, 768]", "[n, 3072]"]),
        (lambda p: image_sets.pickled(p, {**BATCH, "labels": [0, 1, 2, 10]}), ["int64; expected 4 integers 0..9"]),
        (lambda p: image_sets.pickled(p, {**BATCH, "labels": [0, 1, 2]}), ["3 labels of int64; expected 4 integers"]),
        (lambda p: image_sets.pickled(p, Evil()), ["it asks for ", ".mkdir"]),
    ]),
    ("digits5", "SVHN/train_32x32.mat", lambda p: matlab(p, Y=LABELS), ["not a .mat file of X [32, 32, 3, n] and y"]),
    ("digits5", "SVHN/train_32x32.mat", lambda p: matlab(p, X=IMAGE, y=LABELS + 0.5), ["float64; expected 4 integers"]),
    ("digits5", "USPS/usps.t.bz2", lambda p: p.write_bytes(bz2.compress((USPS + USPS[:900]).encode())),
     ["a label 1..10 and 256 values"]),
    ("digits5", "MNIST_M/mnist_m_test.pt", lambda p: torch.save(Evil(), p), ["not a pair of tensors"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "file", "write", "facts"), ARRAYS)
def test_wrong_arrays_are_named(name, file, write, facts, written, here):
    path = written(name, here) / file
    write(path)
    message = refused(name, here)
    assert message.startswith(str(path))
    for fact in facts:
        assert fact in message
    assert not (here / "evil").exists()
