"""A digit that two domains show: whoever divides the rows, nobody is tested on what somebody trains on."""

import numpy as np
import pytest
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.data.dataset import ClientRows, unheld_rows
from rayfed.data.loading import load, load_partitioned
from rayfed.data.partitions.file import save

TRAIN, TEST = 300, 100


@pytest.fixture(scope="module", autouse=True)
def photograph(root):
    """A photograph to make MNIST-M with."""
    (root / "photographs").mkdir()
    Image.new("RGB", (40, 30), (10, 120, 250)).save(root / "photographs/one.png")


def options(name, root):
    if name == "mnist_m":
        return {"size": 28}
    return {"domains": ["mnist", "mnist_m"], "photographs": str(root / "photographs")}


def digit_of(dataset):
    """The number of the digit that each row shows, from its name alone."""
    if dataset.name == "digits5":
        return dataset.index
    files = np.array([name.endswith("t10k") for name in dataset.sources])
    return dataset.index + TRAIN * files[dataset.source]


def sides(dataset, parts):
    """The digits that are trained on, that are for validation, and that are tested, by whomever."""
    shown = digit_of(dataset)
    return [
        set(shown[np.concatenate([getattr(part, side) for part in parts])].tolist())
        for side in ("train", "val", "test")
    ]


PARTITIONS = [
    (None, {}),
    ("domains", {"test": 0.1}),
    ("domains", {"test": 0.3, "clients_per_domain": 3}),
    ("domain_mixes", {"size_sd": 5, "test": 0.2}),
    ("iid", {"clients": 4}),
    ("iid", {"clients": 4, "common_test": True}),
    ("iid", {"clients": 4, "per_client": 51}),
    ("dirichlet", {"clients": 4, "alpha": 1}),
    ("lda", {"clients": 4}),
    ("quantity", {"clients": 3}),
    ("label_k", {"clients": 10}),
    ("pathological", {"clients": 5}),
    ("shards", {"clients": 5}),
]


@pytest.mark.parametrize("name", ["mnist_m", "digits5"])
@pytest.mark.parametrize(("partition", "chosen"), PARTITIONS)
def test_no_digit_is_on_two_sides(root, name, partition, chosen):
    dataset, parts = load_partitioned(name, options(name, root), partition, chosen)
    train, val, test = sides(dataset, parts)
    assert (len(train & test), len(val & test), len(train & val)) == (0, 0, 0)
    held = np.concatenate([rows for part in parts for rows in part[2:]])
    assert len(np.unique(held)) == len(held)
    shown = digit_of(dataset)
    both = np.intersect1d(*(shown[held[dataset.domain[held] == domain]] for domain in (0, 1)))
    assert len(both)  # or there would be nothing to find
    if partition not in (None, "domain_mixes") and "per_client" not in chosen:
        assert len(held) == len(dataset)


@pytest.mark.parametrize("name", ["mnist_m", "digits5"])
def test_a_domain_left_out_shows_nothing_that_is_trained_on_or_is_refused(root, name):
    dataset, parts = load_partitioned(name, options(name, root), None, {}, "mnist_m")
    train, val, _ = sides(dataset, parts)
    population = load(name, options(name, root), None, {}, "mnist_m")
    (ood,) = population.tests
    left = unheld_rows(dataset, parts, "mnist_m")
    assert len(ood.examples) == len(left) == TRAIN + TEST - len(train | val)
    assert not set(digit_of(dataset)[left]) & (train | val)
    with pytest.raises(UsageError, match=r"^test set mnist_m: has no examples, or clients train on all of them$"):
        load(name, options(name, root), "domains", {"test": 0.0}, "mnist_m")


def test_a_partition_that_tests_what_it_trains_on_is_refused(root, tmp_path):
    """As a user's own file may say; every partition is looked at."""
    dataset, _ = load_partitioned("mnist_m", options("mnist_m", root))
    zero, one = (np.flatnonzero(dataset.domain == domain) for domain in (0, 1))
    save(dataset, [ClientRows(0, "both", zero, zero[:0], one)], tmp_path / "split.parquet")
    with pytest.raises(UsageError, match=r"^partition: 400 test rows of mnist_m, the first of them row \d+, show"):
        load("mnist_m", options("mnist_m", root), "file", {"file": str(tmp_path / "split.parquet"), "validation": 0.0})
