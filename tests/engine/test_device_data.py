"""Batches of an epoch: their sizes, their order and what they are drawn from; which arrays are copied.

The value that was unused for the longest time goes first.
"""

import warnings

import numpy as np
import pytest
import torch

from helpers.federations import blobs
from rayfed.algorithm import Phase
from rayfed.core.rng import generator
from rayfed.data.population import Examples
from rayfed.engine import device_data
from rayfed.engine.device_data import Normalise, Part, batch_rows
from rayfed.engine.least_recent import LeastRecent


class TestBatchRows:
    def rows(self, n, size, *, epochs=None, steps=None, drop_last=True, key=0):
        phase = Phase("train", epochs, steps)
        return batch_rows(n, phase, size, drop_last=drop_last, rng=generator(key, "batches"))

    def test_full_batches_only(self):
        rows = self.rows(23, 5, epochs=2)
        assert [len(some) for some in rows] == [5] * 8
        assert all(len(set(np.concatenate(rows[k : k + 4]))) == 20 for k in (0, 4))  # without replacement

    def test_the_last_batch_of_an_epoch_may_be_smaller(self):
        rows = self.rows(23, 5, epochs=2, drop_last=False)
        assert [len(some) for some in rows] == [5, 5, 5, 5, 3] * 2
        assert all(sorted(np.concatenate(rows[k : k + 5])) == list(range(23)) for k in (0, 5))

    def test_fewer_examples_than_a_batch(self):
        for drop_last in (True, False):
            assert [sorted(some) for some in self.rows(3, 5, epochs=2, drop_last=drop_last)] == [[0, 1, 2]] * 2
            assert [sorted(some) for some in self.rows(3, 5, steps=4, drop_last=drop_last)] == [[0, 1, 2]] * 4
        assert self.rows(0, 5, epochs=2) == []

    def test_steps_go_on_over_epochs(self):
        rows = self.rows(20, 5, steps=6)
        assert [len(some) for some in rows] == [5] * 6
        assert sorted(np.concatenate(rows[:4])) == list(range(20))
        assert len(set(np.concatenate(rows[4:]))) == 10

    def test_steps_override_epochs_and_begin_with_the_same_batches(self):
        many, few = self.rows(20, 5, epochs=3, steps=6), self.rows(20, 5, steps=2)
        assert len(many) == 6
        np.testing.assert_array_equal(np.stack(many[:2]), np.stack(few))

    def test_epochs_are_shuffled_anew_by_the_key(self):
        first = self.rows(20, 5, epochs=2)
        assert (np.concatenate(first[:4]) != np.concatenate(first[4:])).any()
        np.testing.assert_array_equal(np.stack(first), np.stack(self.rows(20, 5, epochs=2)))
        assert (np.stack(first) != np.stack(self.rows(20, 5, epochs=2, key=1))).any()


@pytest.mark.parametrize(("dtype", "shared"), [("uint8", True), ("float32", False)])
def test_only_pixels_stay_in_pages_that_processes_share(dtype, shared):
    """Hooks may change floats in place, which would end the process if Ray's object store held them."""
    x, y = np.ones((6, 1, 2, 3), dtype), np.arange(6)
    for array in (x, y):
        array.flags.writeable = False
    normalise = Normalise(blobs(clients=2), torch.device("cpu"), channels_last=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        part = Part(Examples(x, y), torch.device("cpu"), normalise)
    assert np.shares_memory(part.x.numpy(), x) == shared
    assert not np.shares_memory(part.y.numpy(), y)
    for batch in part.batches(4):
        batch.x.add_(1)
        batch.y.add_(1)
    assert x.min() == x.max() == 1
    assert list(y) == list(range(6))


@pytest.mark.parametrize(("most", "side", "reads"), [(1, 4, 5), (64, 4, 3), (10_000, 4, 1), (10_000, 3, 5)])
@pytest.mark.parametrize("data_on_device", [True, False])
def test_batches_that_are_read_together_are_those_that_are_read_one_by_one(
    monkeypatch, most, side, reads, data_on_device
):
    """Examples of 12 numbers are read one by one, since batches of them would not be aligned."""
    monkeypatch.setattr(device_data, "_AT_ONCE", most)
    x = np.random.default_rng(0).integers(0, 256, (9, 1, 4, side), dtype=np.uint8)
    normalise = Normalise(blobs(clients=2), torch.device("cpu"), channels_last=True)
    part = Part(Examples(x, np.arange(9)), torch.device("cpu"), normalise, data_on_device=data_on_device)
    rows, sizes = torch.tensor([8, 1, 5, 0, 2, 3, 4, 4]), [2, 2, 1, 2, 1]
    batches = list(part.taken(rows, sizes))
    for batch, here in zip(batches, rows.split(sizes), strict=True):
        alone = part.take(here)
        torch.testing.assert_close(batch.x, alone.x, rtol=0, atol=0)
        assert batch.y.tolist() == here.tolist()
    together = {batch.x.untyped_storage().data_ptr() for batch in batches}
    assert len(together) == reads


def test_values_go_in_the_order_of_their_last_use():
    store = LeastRecent(10)
    assert store.put("a", 1, 4) == store.put("b", 2, 4) == []
    assert store.get("a") == 1
    assert store.put("c", 3, 4) == [("b", 2)]
    assert (store.get("b"), "a" in store, "b" in store, len(store)) == (None, True, False, 2)
    assert store.put("c", 4, 6) == []  # in place of 4 bytes
    assert store.get("c") == 4
    assert store.put("d", 5, 40) == [("a", 1), ("c", 4)]  # larger than the room
    assert store.get("d") == 5
    assert store.put("e", 6, 1) == [("d", 5)]
