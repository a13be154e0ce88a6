"""Files that are not those that were published: one line each, once, and no error."""

import gzip
import hashlib
import re
import types

import numpy as np
import pytest

from helpers import image_sets
from helpers.mnist_files import idx_bytes
from helpers.published_data import needs
from rayfed.data.loading import load
from rayfed.data.readers import checksums
from rayfed.data.sets.mnist import Mnist

MNIST = {
    "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checksums, "_compared", set())  # as in a new process


def told(capsys):
    """The names of the files that lines complain of."""
    lines = [line for line in capsys.readouterr().err.splitlines() if "md5" in line]
    return [re.search(r"^rayfed: .*/([^/]+): md5 [0-9a-f]{32}, but the published file has", line)[1] for line in lines]


def test_what_torchvision_knows():
    assert checksums.published("MNIST") == MNIST
    assert checksums.published("FashionMNIST")["t10k-labels-idx1-ubyte.gz"] == "bb300cfdad3c16e7a12a480ee83cd310"
    assert checksums.published("CIFAR10")["test_batch"] == "40351d587109b95175f43aff81a1287e"
    assert checksums.published("CIFAR100")["train"] == "16019d7e3df5f24257cddd939b257f8d"
    assert checksums.published("SVHN")["test_32x32.mat"] == "eb5a983be6a315427106f1b164d9cef3"
    assert checksums.published("USPS")["usps.bz2"] == "ec16c51db3855ca6c91edd34d0e9b197"


def test_a_file_of_another_checksum_is_named_once_with_both(tmp_path, monkeypatch, capsys):
    (tmp_path / "MNIST/raw").mkdir(parents=True)
    for source in ("train", "t10k"):
        for kind, array in (("images-idx3", np.zeros((20, 28, 28))), ("labels-idx1", np.arange(20) % 10)):
            packed = gzip.compress(idx_bytes(array), mtime=0)
            (tmp_path / f"MNIST/raw/{source}-{kind}-ubyte.gz").write_bytes(packed)
    right = MNIST | {
        path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in tmp_path.rglob("t10k-*")
    }  # these are as published, the others are not
    monkeypatch.setattr(checksums, "published", lambda name: right)
    Mnist(root=str(tmp_path)).load()
    line = next(line for line in capsys.readouterr().err.splitlines() if "train-labels" in line)
    found = hashlib.md5((tmp_path / "MNIST/raw/train-labels-idx1-ubyte.gz").read_bytes()).hexdigest()
    assert line.startswith(f"rayfed: {tmp_path}/MNIST/raw/train-labels-idx1-ubyte.gz: md5 {found}, ")
    assert MNIST["train-labels-idx1-ubyte.gz"] in line
    monkeypatch.setattr(checksums, "published", None)  # the second start must not ask: torchvision takes a second
    Mnist(root=str(tmp_path)).load()
    assert told(capsys) == []


def test_sets_of_arrays_are_compared_too(tmp_path, capsys):
    image_sets.digits5(tmp_path)
    image_sets.cifar10(tmp_path)
    for start in range(2):
        load("digits5", {"root": str(tmp_path)})
        load("cifar10", {"root": str(tmp_path)}, "iid", {"clients": 2})
        names = ["train_32x32.mat", "test_32x32.mat", "usps.bz2", "usps.t.bz2"]
        names += [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        assert told(capsys) == ([] if start else names)


def test_a_torchvision_that_knows_no_checksums_is_no_error(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torchvision", types.SimpleNamespace(datasets=object()))
    assert checksums.published("MNIST") == {}


@needs("MNIST/raw")
def test_the_real_files_are_packed_anew(capsys):
    """Those of t10k hold the original bytes, but not in the original .gz files."""
    Mnist().load()
    load("digits5", {"domains": ["mnist"]})
    assert sorted(told(capsys)) == sorted(MNIST)
