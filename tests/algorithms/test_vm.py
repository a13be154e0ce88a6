"""VM: the clients' weights, and Eq. 24 as it is printed."""

import pytest
import torch

from helpers.federations import net
from helpers.reference import population, run
from rayfed.algorithms.vm import VM, variance_weights
from rayfed.core.errors import Diverged


@pytest.mark.parametrize(("variant", "expected"), [("paper", [0, 1 / 3, 2 / 3]), ("code", [-2 / 3, 1 / 3, 4 / 3])])
def test_weights_of_three_equal_clients(variant, expected):
    thirds = torch.full((3,), 1 / 3, dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    assert variance_weights(losses, thirds, 0.5, variant).tolist() == pytest.approx(expected)


def test_weights_of_unequal_clients_sum_to_one():
    parts = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    losses = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    found = variance_weights(losses, parts, 0.5, "paper")  # the mean loss is 2.8
    assert found.tolist() == pytest.approx([0.2 * (1 - 1.8), 0.3 * (1 - 0.8), 0.5 * (1 + 1.2)])
    assert found.sum().item() == pytest.approx(1)


def test_weights_out_of_bounds_stop_the_run():
    people = population()
    with pytest.raises(Diverged, match=r"^round 1, client \d: VM's weight is -?[\d.]+, beyond ±5; .*beta=500, use a"):
        run(VM(beta=500.0), people, net(False))
