"""Seeds, and torch's random state."""

import random
from contextlib import suppress
from operator import attrgetter

import numpy as np
import pytest
import torch
from torch import backends

from rayfed.core.ids import Moment
from rayfed.core.rng import choose_tf32, global_generators_seeded, global_state_kept, stream_seed


class TestSeeds:
    def test_streams_are_kept_apart(self):
        first = [stream_seed(seed, what, client=1) for seed, what in ((0, "start"), (1, "start"), (0, "finish"))]
        fields = ({"client": 12}, {"round": 1}, {"client": 1, "round": 2}, {"client": 2, "round": 1})
        streams = first + [stream_seed(0, "start", **named) for named in fields]
        assert len(set(streams)) == len(streams)
        assert all(0 <= seed < 2**56 for seed in streams)

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
            with global_state_kept():
                torch.manual_seed(9)
                torch.set_num_threads(2)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            interfere()
        assert torch.get_num_threads() == 1
        assert torch.equal(torch.rand(2), expected)


class TestTF32:
    """torch has old switches and, since 2.9, present ones; it refuses to tell the old ones where the two disagree."""

    PRESENT = ("cuda.matmul", "cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul")

    @pytest.fixture(autouse=True)
    def as_torch_begins_afterwards(self):
        yield
        if hasattr(backends.cuda.matmul, "fp32_precision"):
            backends.fp32_precision = backends.cudnn.fp32_precision = "none"
        backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")

    def told(self):
        """Every switch that torch tells."""
        told = {}
        present = [f"{name}.fp32_precision" for name in self.PRESENT]
        for name in ("cudnn.allow_tf32", "cuda.matmul.allow_tf32", *present):
            with suppress(RuntimeError, AttributeError):
                told[name] = attrgetter(name)(backends)
        return told

    def chosen_and_restored(self, allowed):
        before = self.told()
        with global_state_kept():
            choose_tf32(allowed)
            inside = self.told()
            assert inside["cudnn.allow_tf32"] is inside["cuda.matmul.allow_tf32"] is allowed
            chosen = {inside.get(f"{name}.fp32_precision") for name in ("cuda.matmul", "cudnn.conv", "cudnn.rnn")}
            assert chosen <= {"tf32" if allowed else "ieee", None}
        assert self.told() == before

    @pytest.mark.parametrize(("allowed", "matmul", "cudnn"), [(True, "highest", False), (False, "medium", True)])
    def test_the_old_switches(self, allowed, matmul, cudnn):
        torch.set_float32_matmul_precision(matmul)
        backends.cudnn.allow_tf32 = cudnn
        self.chosen_and_restored(allowed)

    @pytest.mark.skipif(not hasattr(backends.cuda.matmul, "fp32_precision"), reason="torch before 2.9 has none")
    @pytest.mark.parametrize("allowed", [True, False])
    @pytest.mark.parametrize("value", ["tf32", "ieee"])
    @pytest.mark.parametrize("name", ["", *PRESENT])
    def test_the_present_switches(self, allowed, value, name):
        (attrgetter(name)(backends) if name else backends).fp32_precision = value
        self.chosen_and_restored(allowed)
