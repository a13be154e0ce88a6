"""MNIST's IDX files: read plain and gzipped, from a read-only folder, and every way in which they can be wrong."""

import gzip
import hashlib
import re
from dataclasses import replace

import numpy as np
import pytest

from helpers.mnist_files import idx_bytes, write_mnist
from rayfed.core.errors import UsageError
from rayfed.data.published import sources
from rayfed.data.readers.files import print_once
from rayfed.data.sets.mnist import FashionMnist, Mnist

COUNTS = {"train": 12, "t10k": 6}


def arrays():
    random = np.random.default_rng(5)
    return {
        source: (random.integers(0, 256, (count, 28, 28)), np.arange(count) % 10) for source, count in COUNTS.items()
    }


@pytest.fixture
def root(tmp_path):
    """A folder as torchvision lays it out: the training files plain, the test files gzipped."""
    write_mnist(tmp_path, *(images for images, _ in arrays().values()))
    for path in (tmp_path / "MNIST/raw").glob("t10k*"):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return tmp_path


def test_plain_and_gzipped_files_give_the_same_pixels(root):
    dataset = Mnist(root=str(root)).load()
    for code, (images, labels) in enumerate(arrays().values()):
        own = dataset.source == code
        np.testing.assert_array_equal(dataset.images[own][:, 0], images)
        np.testing.assert_array_equal(dataset.labels[own], labels)
        np.testing.assert_array_equal(dataset.index[own], np.arange(len(labels)))
        assert (dataset.is_test[own] == (code == 1)).all()
    assert dataset.images.dtype == np.uint8
    assert dataset.images.shape == (18, 1, 28, 28)
    assert (dataset.mean, dataset.std, dataset.sources) == ((0.5,), (0.5,), ("train", "t10k"))


def test_files_that_are_not_the_published_ones_are_named_at_every_start(root, capsys, monkeypatch):
    """Plain files and gzipped ones; of the others nothing is said."""
    changed, right = ("raw/train-images-idx3-ubyte", "raw/t10k-labels-idx1-ubyte.gz"), "raw/train-labels-idx1-ubyte"
    source = sources()["mnist"]
    known = {file: "md5:" + hashlib.md5((root / "MNIST" / file).read_bytes()).hexdigest() for file in [right]}
    files = {file: source.files[file] for file in changed[1:]}
    known |= {file: source.known[file] for file in changed[:1]}
    monkeypatch.setitem(sources(), "mnist", replace(source, files=files, known=known))
    for _ in range(2):
        print_once.cache_clear()
        Mnist(root=str(root)).load()
        lines = sorted(capsys.readouterr().err.splitlines())
        assert len(lines) == 2
        for file, line in zip(sorted(changed), lines, strict=True):
            assert re.match(rf"rayfed: {root}/MNIST: {file[4:]} has md5 \w+, but the published file has \w+$", line)


def test_missing_files_name_folder_files_and_remedies(root):
    (root / "MNIST/raw/train-labels-idx1-ubyte").unlink()
    with pytest.raises(UsageError) as caught:
        Mnist(root=str(root)).load()
    message = str(caught.value)
    for fact in (str(root / "MNIST"), "raw/train-labels-idx1-ubyte", "data.download=true", "data.root"):
        assert fact in message
    assert "t10k" not in message
    with pytest.raises(UsageError, match=r"FashionMNIST: no such folder; expected the folder raw with"):
        FashionMnist(root=str(root)).load()


@pytest.mark.parametrize(
    ("file", "change", "facts"),
    [
        ("train-images-idx3-ubyte", lambda b: b[:-1], ["truncated", "IDX file of images", "9407"]),
        ("train-images-idx3-ubyte", lambda b: b"<htm" + b[4:], ["0x3c68746d", "IDX file of images"]),
        ("train-labels-idx1-ubyte", lambda b: idx_bytes(np.zeros(11)), ["11 labels of uint8; expected 12"]),
        ("train-labels-idx1-ubyte", lambda b: idx_bytes(np.full(12, 10)), ["expected 12 integers 0..9"]),
        ("t10k-images-idx3-ubyte", lambda b: b[:40] + bytes(20) + b[60:], ["damaged", "IDX file of images"]),
        ("t10k-labels-idx1-ubyte", lambda b: b"not gzip at all", ["damaged", "IDX file of labels"]),
    ],
)
def test_a_damaged_file_is_named_with_what_was_expected(root, file, change, facts):
    (broken,) = (root / "MNIST/raw").glob(f"{file}*")
    broken.write_bytes(change(broken.read_bytes()))
    with pytest.raises(UsageError) as caught:
        Mnist(root=str(root)).load()
    message = str(caught.value)
    assert message.startswith(str(broken))
    for fact in facts:
        assert fact in message
