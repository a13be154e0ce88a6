"""FedReg: two rounds by hand, and what the projection does."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, data, plan, population, run
from rayfed.algorithms.fedreg import FedReg
from rayfed.core.task import Batch


def pseudo(model, x, y, size):
    for _ in range(10):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        x = (x + size * grad.sign()).detach()
    return x


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def at(model, values):
    model = copy.deepcopy(model)
    torch.nn.utils.vector_to_parameters(values, model.parameters())
    return model


def gradient(model, x, y):
    return torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))])


@pytest.mark.parametrize("gamma", [0.5, 1.0])
def test_two_rounds_by_hand(gamma):
    people, model = population(), net(batch_norm=False)
    server = run(FedReg(eta_s=0.2, gamma=gamma), people, model)
    used = 0
    for _ in range(2):
        ends, old = [], vector(model)
        for i in CLIENTS:
            x, y = data(people, i)
            x_s, x_p = pseudo(model, x, y, 0.2), pseudo(model, x, y, 0.002)
            soft = model(x_s).softmax(1).detach()
            theta = old.clone()
            for _ in range(2):
                theta = theta - LR * gradient(at(model, gamma * theta + (1 - gamma) * old), x, y)
                middle = at(model, (theta + old) / 2)
                g2, g3 = gradient(middle, x_s, soft), gradient(middle, x_p, y)
                d = theta - old
                w = max(0.0, (d @ g2 / (g2 @ g2)).item())
                w2 = max(0.0, ((d - w * g2) @ g3 / (g3 @ g3)).item())
                used += (w > 0) + (w2 > 0)
                theta = theta - w * g2 - w2 * g3
            ends.append(theta)
        model = at(model, sum(ends) / 3)
    assert used
    assert_weights(server.state["weights"], model, atol=2e-5)


def test_pseudo_data_goes_up_the_loss_and_out_of_the_range_of_the_batch():
    """Logits (x, −x) have a loss that falls with x for class 0, so ten steps of 0.1 take x from 0.5 to −0.5."""
    people, model = population(), net(batch_norm=False)
    ctx = plan(FedReg(), people, model).context(people, "cpu")
    ctx.task.model = lambda weights, x, *, train: (torch.cat([x, -x], 1), {})
    x, y = torch.tensor([[0.5], [0.2]]), torch.tensor([0, 1])
    moved = FedReg().pseudo_inputs(ctx, {}, Batch(x, y), 0.1)
    torch.testing.assert_close(moved, torch.tensor([[-0.5], [1.2]]))
