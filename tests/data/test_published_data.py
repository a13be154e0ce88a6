"""The real files and the published splits, where RAYFED_DATA says that they are."""

import numpy as np
import pytest

from helpers.published_data import FASHION, ROOT, SPLIT, needs
from rayfed.core.errors import UsageError
from rayfed.data.loading import load
from rayfed.data.sets.mnist import Mnist


@needs("MNIST/raw")
def test_mnist_counts():
    dataset = Mnist().load()
    assert np.bincount(dataset.source).tolist() == [60000, 10000]
    # The counts per digit that are published for the two sets.
    assert np.bincount(dataset.labels[~dataset.is_test]).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949,
    ]  # fmt: skip
    assert np.bincount(dataset.labels[dataset.is_test]).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009,
    ]  # fmt: skip


@needs("MNIST/raw")
@needs(SPLIT.relative_to(ROOT))
def test_the_published_mnist_split_gives_every_image_once():
    population = load("mnist", {}, "file", {"file": str(SPLIT), "validation": 0.0})
    assert len(population.clients) == 20
    sizes = np.array([[len(client.train), len(client.test)] for client in population.clients])
    assert sizes.sum() == 70000
    totals = sizes.sum(axis=1)
    np.testing.assert_array_equal(sizes[:, 0], totals * 3 // 4)
    labels = np.concatenate([part.y for client in population.clients for part in (client.train, client.test)])
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(Mnist().load().labels))


@needs(FASHION.relative_to(ROOT))
def test_the_published_fashion_split_has_19_clients_that_can_train(tmp_path):
    with pytest.raises(UsageError, match=r"client 12 .* no training examples \(2138 .*, as 1 of 20 clients"):
        load("npz", {"file": str(FASHION)})
    with np.load(FASHION) as stored:
        kept = {name: stored[name][stored["client"] != 12] for name in ("images", "labels", "client", "is_test")}
    np.savez(tmp_path / "kept.npz", **kept)
    population = load("npz", {"file": str(tmp_path / "kept.npz")}, None, {"validation": 0.0})
    assert len(population.clients) == 19
    assert [client.domain for client in population.clients[11:14]] == ["client-11", "client-13", "client-14"]
    assert sum(len(client.train) + len(client.test) for client in population.clients) == 63587 - 2138
    assert population.shape == (1, 28, 28)
