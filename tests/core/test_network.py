"""Networks whose modules' own tensors something else holds, in the steps of a client."""

import pytest
import torch
from torch import Tensor, nn

from rayfed.core.network import Network, gradients, weights_of, weights_stay

X = torch.tensor([[1.0, 2.0], [3.0, 5.0]])


class Penalised(nn.Module):
    """A linear layer and ‖w‖² of its weight, which it holds in a list since it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False)
        self.held = [self.layer.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + self.held[0].square().sum()


def step(network, weights):
    found, _, _ = gradients(lambda trained: network(trained, X), weights)
    return {name: value - 0.1 * found[name] for name, value in weights.items()}


def test_steps_compute_with_their_own_weights_and_leave_none_behind():
    module = Penalised()
    first = weights_of(module)
    network = Network(module)
    weights = {"layer.weight": torch.tensor([[0.5, -1.0]])}
    by_hand = weights["layer.weight"]
    with weights_stay():
        for _ in range(3):
            weights = step(network, weights)
            by_hand = by_hand - 0.1 * (torch.tensor([[4.0, 7.0]]) + 2 * by_hand)
            torch.testing.assert_close(module.held[0].detach(), module.layer.weight.detach(), rtol=0, atol=0)
    torch.testing.assert_close(weights["layer.weight"], by_hand)
    assert module.layer.weight is module.held[0]
    assert torch.equal(module.held[0], first["layer.weight"])


def test_a_step_that_fails_leaves_no_weights_behind():
    module = Penalised()
    first = weights_of(module)
    network = Network(module)
    wrong = torch.ones(3, 4)
    with pytest.raises(RuntimeError, match="cannot be multiplied"), weights_stay():
        gradients(lambda trained: network(trained, wrong), {"layer.weight": torch.ones(1, 2)})
    assert module.layer.weight is module.held[0]
    assert torch.equal(module.held[0], first["layer.weight"])


def test_a_forward_pass_between_two_steps_has_other_weights():
    module = Penalised()
    network = Network(module)
    with weights_stay(), torch.no_grad():
        weights = step(network, {"layer.weight": torch.ones(1, 2)})
        value, _ = network({"layer.weight": torch.zeros(1, 2)}, X, train=False)
        again = step(network, weights)
    assert not value
    by_hand = weights["layer.weight"] - 0.1 * (torch.tensor([[4.0, 7.0]]) + 2 * weights["layer.weight"])
    torch.testing.assert_close(again["layer.weight"], by_hand)
