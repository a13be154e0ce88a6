"""Seeds, and torch's random state."""

import random

import numpy as np
import pytest
import torch

from rayfed.core.moment import Moment
from rayfed.core.rng import global_generators_seeded, stream_seed, torch_state_kept


class TestSeeds:
    def test_streams_are_kept_apart(self):
        streams = [
            stream_seed(0, "start", client=1),
            stream_seed(1, "start", client=1),
            stream_seed(0, "finish", client=1),
            stream_seed(0, "start", client=12),
            stream_seed(0, "start", round=1),
            stream_seed(0, "start", client=1, round=2),
            stream_seed(0, "start", client=2, round=1),
        ]
        assert len(set(streams)) == len(streams)
        assert all(0 <= seed < 2**56 for seed in streams)

    def test_the_order_of_fields_changes_nothing(self):
        assert stream_seed(3, "batches", client=1, phase=2) == stream_seed(3, "batches", phase=2, client=1)
        moment = Moment("round", 4, 1)
        by_name = {"exchange": 1, "client": 5, "round": 4, "stage": "round"}
        assert stream_seed(3, "start", moment, client=5) == stream_seed(3, "start", **by_name)

    def test_streams_stay_what_they_are(self):
        assert stream_seed(0, "batches", Moment("round", 1), phase=0, client=3) == 11075573076275568

    def test_code_of_users_draws_by_the_seed_and_leaves_no_trace(self):
        def draws(seed):
            with global_generators_seeded(seed, "model"):
                return random.random(), np.random.rand(), torch.rand(1).item()

        before = random.getstate(), np.random.get_state()[2], torch.get_rng_state()
        first, again, other = draws(0), draws(0), draws(1)
        assert first == again
        assert all(a != b for a, b in zip(first, other, strict=True))
        assert (random.getstate(), np.random.get_state()[2]) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])

    def test_torch_is_left_alone(self):
        torch.manual_seed(3)
        expected = torch.rand(2)
        torch.manual_seed(3)

        def interfere():
            with torch_state_kept():
                torch.manual_seed(9)
                torch.set_num_threads(2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interfere()
        assert torch.get_num_threads() == 1
        assert torch.equal(torch.rand(2), expected)
