"""Seeds, and torch's random state."""

import pytest
import torch

from rayfed.core.rng import seed_of, torch_state_kept


class TestSeeds:
    def test_parts_are_kept_apart(self):
        assert seed_of(1, 23) != seed_of(12, 3)
        assert seed_of(0, "a") == seed_of(0, "a")
        assert 0 <= seed_of("x") < 2**56

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
