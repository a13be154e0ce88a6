"""FedDyn: a linear and a quadratic term that make the local optimum the common one."""

import copy

import pytest
import torch

from helpers.federations import Point, blueprint, net, quadratic, quadratics, simulate
from helpers.reference import CLIENTS, assert_weights, cross_entropy, data, descend, mean, population, run
from rayfed.algorithm import Phase
from rayfed.algorithms.feddyn import FedDyn
from rayfed.core.optim import SGD


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_three_rounds_by_hand(momentum):
    people, model, alpha = population(), net(), 0.3
    ours = SGD(lr=0.1, momentum=momentum)
    server = run(FedDyn(alpha=alpha), people, model, steps=3, rounds=3, optimizer=ours)
    zeros = [torch.zeros_like(p) for p in model.parameters()]
    own, h = [zeros] * 3, zeros
    for _ in range(3):
        trained = []
        for i in CLIENTS:
            received = [p.detach().clone() for p in model.parameters()]

            def loss(m, x, y, g=own[i], received=received):
                terms = zip(m.parameters(), g, received, strict=True)
                extra = sum(-(p * c).sum() + alpha / 2 * (p - r).square().sum() for p, c, r in terms)
                return cross_entropy(m, x, y) + extra

            after = descend(
                model, *data(people, i), 3, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum)
            )
            pairs = zip(own[i], after.parameters(), received, strict=True)
            own[i] = [c - alpha * (p.detach() - r) for c, p, r in pairs]
            trained.append(after)
        following = mean(trained, [1 / 3] * 3)
        moves = [p.detach() - q.detach() for p, q in zip(following.parameters(), model.parameters(), strict=True)]
        h = [c - alpha * m for c, m in zip(h, moves, strict=True)]
        model = copy.deepcopy(following)
        with torch.no_grad():
            for p, c in zip(model.parameters(), h, strict=True):
                p -= c / alpha
    assert_weights(server.state["weights"], model, atol=1e-5)
    names = [name for name, _ in model.named_parameters()]
    for i, state in server.fleet.states.items():
        for name, g in zip(names, own[i], strict=True):
            torch.testing.assert_close(state["g"][name], g, rtol=1e-4, atol=1e-5)
    for name, c in zip(names, h, strict=True):
        torch.testing.assert_close(server.state["h"][name], c, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("cohort", "width"), [(2, 1), (2, 2), (1, 1)])
def test_it_reaches_the_optimum_of_the_mean(cohort, width):
    population = quadratics((1.0, 0.0), (4.0, 10.0))  # FedAvg stops at 7.556, the optimum is 8
    local = Phase("train", steps=30)
    changes = {"model": Point(), "loss": quadratic, "batch_size": 1, "optimizer": SGD(lr=0.1)}
    plan = blueprint(
        FedDyn(alpha=1.0), population, rounds=40, local=local, cohort=cohort, vmap_clients=width, **changes
    )
    server, _ = simulate(plan, population, every=40)
    assert server.state["weights"]["w"].item() == pytest.approx(8.0, abs=1e-3)
    for i, (h, a) in enumerate(((1.0, 0.0), (4.0, 10.0))):  # g_i has become the gradient at the optimum
        assert server.fleet.states[i]["g"]["w"].item() == pytest.approx(h * (8 - a), abs=1e-2)


def test_the_server_divides_by_all_clients_and_sizes_do_not_count():
    people = population()
    server = run(FedDyn(alpha=0.5), people, net(batch_norm=False), rounds=1, cohort=2)
    sample = server.sample(1)
    trained = [descend(net(batch_norm=False), *data(people, i), 2, loss=proximal) for i in sample]
    following = mean(trained, [0.5, 0.5])
    with torch.no_grad():
        for p, q in zip(following.parameters(), net(batch_norm=False).parameters(), strict=True):
            p += 2 / 3 * (p - q)  # h = −α · 2/3 · (mean − start)
    assert_weights(server.state["weights"], following)


def proximal(model, x, y):
    start = net(batch_norm=False).parameters()
    return cross_entropy(model, x, y) + 0.25 * sum(
        (p - q.detach()).square().sum() for p, q in zip(model.parameters(), start, strict=True)
    )


@pytest.mark.parametrize("scored", ["mean", "cloud"])
def test_the_mean_of_the_sampled_models_or_the_model_that_clients_receive_is_scored(scored):
    """On quadratics h_i/2 (w − a_i)², one step of 0.1 from 0 takes w to 0.1 h_i a_i: to 0.1 and 0.4, on average 0.25.

    With α = 0.5, h = −0.5 · 0.25, so clients receive 0.25 + 0.25. The losses at 0.25 and 0.5 are those of the scores.
    """
    population = quadratics((1.0, 1.0), (2.0, 2.0))
    changes = {"model": Point(), "loss": quadratic, "batch_size": 1, "optimizer": SGD(lr=0.1)}
    plan = blueprint(FedDyn(alpha=0.5, scored=scored), population, rounds=1, local=Phase("train", steps=1), **changes)
    server, records = simulate(plan, population, points=("global", "downloaded"))
    assert server.state["weights"]["w"].item() == pytest.approx(0.5)
    w = {"mean": 0.25, "cloud": 0.5}[scored]
    assert server.algorithm.global_model(server.ctx, server.state)["w"].item() == pytest.approx(w)
    losses = {(s.point, s.client): s.value for s in records[0].scores if s.metric == "loss" and s.split == "test"}
    assert losses["global", 0] == pytest.approx((w - 1) ** 2 / 2)
    assert losses["global", 1] == pytest.approx((w - 2) ** 2)
    assert losses["downloaded", 0] == pytest.approx((0.5 - 1) ** 2 / 2)
