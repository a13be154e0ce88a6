"""FedReg: two rounds by hand, and what the projection does."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, data, plan, population, run
from rayfed.algorithms.fedreg import FedReg
from rayfed.core.errors import UsageError
from rayfed.data.population import Examples


def pseudo(model, x, y, size):
    low, high = x.min(), x.max()
    for _ in range(10):
        x = x.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        x = (x - size * grad.sign()).detach().clamp(low, high)
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


def test_tokens_are_refused():
    people = population()
    clients = [replace(c, train=Examples(np.zeros((len(c.train), 6), np.int64), c.train.y)) for c in people.clients]
    with pytest.raises(UsageError, match=r"^algorithm.name=fedreg: needs continuous inputs, got tokens"):
        plan(FedReg(), people, net()).check(replace(people, clients=tuple(clients)))
