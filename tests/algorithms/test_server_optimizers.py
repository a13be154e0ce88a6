"""FedAvgM, FedAdagrad, FedAdam and FedYogi: the server's step on the mean update, by hand."""

import copy

import pytest
import torch

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.server_optimizers import FedAdagrad, FedAdam, FedAvgM, FedYogi


def two_rounds(model, step, rounds=3):
    """What is left after rounds in which `step(Δ, state) -> (step, state)` moves every parameter; names to states."""
    people, states = population(), {}
    for _ in range(rounds):
        following = mean([descend(model, *data(people, i), 2) for i in CLIENTS], shares(people))
        moved = copy.deepcopy(following)  # with the averaged statistics
        with torch.no_grad():
            for (name, target), p, q in zip(
                moved.named_parameters(), model.parameters(), following.parameters(), strict=True
            ):
                change, states[name] = step(q - p, states.get(name))
                target.copy_(p + change)
        model = moved
    return model


def nesterov(delta, velocity):
    velocity = delta if velocity is None else 0.6 * velocity + delta
    return 0.5 * (delta + 0.6 * velocity), velocity


def heavy_ball(delta, velocity):
    velocity = delta if velocity is None else 0.6 * velocity + delta
    return 0.5 * velocity, velocity


def adam(delta, moments):
    m, v = moments or (torch.zeros_like(delta), torch.full_like(delta, 0.01**2))
    m, v = 0.8 * m + 0.2 * delta, 0.95 * v + 0.05 * delta**2
    return 0.03 * m / (v.sqrt() + 0.01), (m, v)


def yogi(delta, moments):
    m, v = moments or (torch.zeros_like(delta), torch.full_like(delta, 0.01**2))
    m = 0.8 * m + 0.2 * delta
    v = torch.where(v > delta**2, v - 0.05 * delta**2, v + 0.05 * delta**2)
    return 0.03 * m / (v.sqrt() + 0.01), (m, v)


def adagrad(delta, moments):
    v = 0.01**2 if moments is None else moments
    return 0.03 * delta / (torch.sqrt(v + delta**2) + 0.01), v + delta**2


def adagrad_with_momentum(delta, moments):
    m, v = moments or (0, 0.01**2)
    m, v = 0.8 * m + 0.2 * delta, v + delta**2
    return 0.03 * m / (v.sqrt() + 0.01), (m, v)


ADAPTIVE = {"server_lr": 0.03, "beta1": 0.8, "beta2": 0.95, "tau": 0.01}


@pytest.mark.parametrize(
    ("algorithm", "step"),
    [
        (FedAvgM(momentum=0.6, server_lr=0.5), heavy_ball),
        (FedAvgM(momentum=0.6, server_lr=0.5, nesterov=True), nesterov),
        (FedAdam(**ADAPTIVE), adam),
        (FedYogi(**ADAPTIVE), yogi),
        (FedAdagrad(server_lr=0.03, tau=0.01), adagrad),
        (FedAdagrad(server_lr=0.03, tau=0.01, beta1=0.8), adagrad_with_momentum),
    ],
    ids=["fedavgm", "nesterov", "fedadam", "fedyogi", "fedadagrad", "fedadagrad with momentum"],
)
def test_three_rounds_by_hand(algorithm, step):
    server = run(algorithm, population(), net(), rounds=3)
    assert_weights(server.state["weights"], two_rounds(net(), step), atol=2e-6)


def test_personal_batch_norm_has_no_moments():
    server = run(FedAdam(), population(), net(), batch_norm="local")
    names = set(server.state["optimizer"]["first"])
    assert names == set(server.state["weights"])
    assert not names & server.ctx.task.batch_norm_names
