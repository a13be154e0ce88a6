"""What the tests of data share: a cache for each file, and MNIST written from images of our own making."""

import numpy as np
import pytest

from helpers.image_sets import WRITERS
from helpers.mnist_files import write_mnist


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFED_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A cache of its own for one test, which does not exist yet."""
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """Where each set of images lies, written once."""
    folders = {}

    def root(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            WRITERS[name](folders[name])
        return folders[name]

    return root


@pytest.fixture(scope="module")
def digits(request):
    """Images of noise: the file's TRAIN for training, then TEST for testing."""
    number = request.module.TRAIN + request.module.TEST
    return np.random.default_rng(3).integers(0, 256, (number, 28, 28)).astype(np.uint8)


@pytest.fixture(scope="module")
def root(request, digits, tmp_path_factory):
    """The folder of MNIST, which RAYFED_DATA names: the file's `digits`, of which the first TRAIN are for training."""
    train = request.module.TRAIN
    folder = write_mnist(tmp_path_factory.mktemp("data"), digits[:train], digits[train:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAYFED_DATA", str(folder))
        yield folder
