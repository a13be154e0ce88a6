"""SCAFFOLD's rule against torch.optim on copied modules."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, data, mean, population, run
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.optim import SGD

STEPS, ROUNDS, SERVER_LR = 3, 4, 0.7


def zeros(model):
    return [torch.zeros_like(p) for p in model.parameters()]


def trained(model, x, y, c, own, momentum):
    """(a trained copy of `model`, the mean of its raw gradients: c_i⁺), steps along g − c_i + c."""
    model = copy.deepcopy(model).train()
    sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    total = zeros(model)
    for _ in range(STEPS):
        sgd.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p, summed, server, client in zip(model.parameters(), total, c, own, strict=True):
            summed.add_(p.grad)
            p.grad.add_(server - client)
        sgd.step()
    return model, [summed / STEPS for summed in total]


@pytest.mark.parametrize(("momentum", "weighting"), [(0.0, "equal"), (0.9, "equal"), (0.0, "examples")])
def test_four_rounds_of_two_of_three_clients_by_hand(momentum, weighting):
    """Without momentum this holds option II's c_i − c + (x − y)/(K η) against the mean gradient, which it equals."""
    people, model = population(), net()
    sgd = SGD(lr=LR, momentum=momentum)
    changes = {"steps": STEPS, "rounds": ROUNDS, "cohort": 2, "optimizer": sgd}
    server = run(Scaffold(server_lr=SERVER_LR, weighting=weighting), people, model, **changes)
    c, own = zeros(model), [zeros(model) for _ in CLIENTS]
    for number in range(1, ROUNDS + 1):
        cohort, models, changed = server.sample(number), [], zeros(model)
        sizes = [len(data(people, i)[1]) if weighting == "examples" else 1 for i in cohort]
        weights = [size / sum(sizes) for size in sizes]
        for i, weight in zip(cohort, weights, strict=True):
            local, new = trained(model, *data(people, i), c, own[i], momentum)
            changed = [sum_ + weight * (a - b) for sum_, a, b in zip(changed, new, own[i], strict=True)]
            own[i] = new
            models.append(local)
        after = mean(models, weights)  # running statistics as well
        with torch.no_grad():
            for moved, old in zip(after.parameters(), model.parameters(), strict=True):
                moved.copy_(old + SERVER_LR * (moved - old))
        c = [old + step * len(cohort) / len(CLIENTS) for old, step in zip(c, changed, strict=True)]
        model = after
    assert len({server.sample(number) for number in range(1, ROUNDS + 1)}) > 1
    assert_weights(server.state["weights"], model, atol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    assert set(server.state["c"]) == set(names)
    for name, value in zip(names, c, strict=True):
        torch.testing.assert_close(server.state["c"][name], value, rtol=1e-4, atol=1e-5)
    for i, state in server.fleet.states.items():
        for name, value in zip(names, own[i], strict=True):
            torch.testing.assert_close(state["c"][name], value, rtol=1e-4, atol=1e-5)
