"""SCAFFOLD's rule against torch.optim on copied modules, and beside FedAvg on quadratics with known solutions."""

import copy

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import Point, blueprint, net, quadratic, quadratics, simulate
from helpers.reference import CLIENTS, LR, assert_weights, data, mean, population, run
from rayfed.algorithm import Phase
from rayfed.algorithms.fedavg import FedAvg
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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_four_rounds_of_two_of_three_clients_by_hand(momentum):
    """Without momentum this holds option II's c_i − c + (x − y)/(K η) against the mean gradient, which it equals."""
    people, model = population(), net()
    sgd = SGD(lr=LR, momentum=momentum)
    changes = {"steps": STEPS, "rounds": ROUNDS, "cohort": 2, "optimizer": sgd}
    server = run(Scaffold(server_lr=SERVER_LR), people, model, **changes)
    c, own = zeros(model), [zeros(model) for _ in CLIENTS]
    for number in range(1, ROUNDS + 1):
        cohort, models, changed = server.sample(number), [], zeros(model)
        for i in cohort:
            local, new = trained(model, *data(people, i), c, own[i], momentum)
            changed = [sum_ + a - b for sum_, a, b in zip(changed, new, own[i], strict=True)]
            own[i] = new
            models.append(local)
        after = mean(models, [1 / 2, 1 / 2])  # whatever the clients' sizes, running statistics as well
        with torch.no_grad():
            for moved, old in zip(after.parameters(), model.parameters(), strict=True):
                moved.copy_(old + SERVER_LR * (moved - old))
        c = [old + step / len(CLIENTS) for old, step in zip(c, changed, strict=True)]  # |S|/N of their mean over S
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


CURVES = ((1.0, 0.0), (4.0, 10.0))  # the optimum of the mean is (1·0 + 4·10) / (1 + 4) = 8
SETTLED = 50


def settle(algorithm, width=1, **sgd):
    population = quadratics(*CURVES)
    plan = blueprint(
        algorithm,
        population,
        model=Point(),
        loss=quadratic,
        optimizer=SGD(lr=0.02, **sgd),
        local=Phase("train", steps=10),
        batch_size=1,
        rounds=SETTLED,
        vmap_clients=width,
    )
    server, _ = simulate(plan, population, every=SETTLED)
    return server.state["weights"]["w"].item()


@pytest.mark.parametrize("width", [1, 2])
def test_fedavg_stops_at_its_biased_point(width):
    # ten steps shrink the distance to a_i by (1 − 0.02 h_i)^10: the fixed point weighs a_i by 1 minus that
    pull = [1 - (1 - 0.02 * h) ** 10 for h, _ in CURVES]
    biased = sum(p * a for p, (_, a) in zip(pull, CURVES, strict=True)) / sum(pull)
    assert biased == pytest.approx(7.55621, abs=1e-5)
    assert settle(FedAvg(), width) == pytest.approx(biased, abs=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("width", [1, 2])
def test_scaffold_reaches_the_optimum(width, momentum):
    assert settle(Scaffold(), width, momentum=momentum) == pytest.approx(8.0, abs=1e-4)
