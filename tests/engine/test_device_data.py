"""Batches of an epoch: their sizes, their order and what they are drawn from."""

import numpy as np

from rayfed.core.rng import generator
from rayfed.engine.device_data import batch_rows


class TestBatchRows:
    def rows(self, n, size, *, epochs=None, steps=None, drop_last=True, key=0):
        return batch_rows(n, size, epochs=epochs, steps=steps, drop_last=drop_last, rng=generator(key, "batches"))

    def test_full_batches_only(self):
        rows = self.rows(23, 5, epochs=2)
        assert [len(some) for some in rows] == [5] * 8
        assert all(len(set(np.concatenate(rows[k : k + 4]))) == 20 for k in (0, 4))  # without replacement

    def test_the_last_batch_of_an_epoch_may_be_smaller(self):
        rows = self.rows(23, 5, epochs=2, drop_last=False)
        assert [len(some) for some in rows] == [5, 5, 5, 5, 3] * 2
        assert all(sorted(np.concatenate(rows[k : k + 5])) == list(range(23)) for k in (0, 5))

    def test_fewer_examples_than_a_batch(self):
        assert self.rows(3, 5, epochs=2) == []
        assert [sorted(some) for some in self.rows(3, 5, epochs=1, drop_last=False)] == [[0, 1, 2]]
        assert self.rows(3, 5, steps=4) == []

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
