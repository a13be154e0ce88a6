"""FedProx, Ditto, pFedMe and FedDyn, which pull weights towards others, against torch.optim on the pulled losses."""

import copy

import pytest
import torch

from helpers.federations import Point, blueprint, net, quadratic, quadratics, simulate
from helpers.reference import (
    CLIENTS,
    LR,
    assert_weights,
    cross_entropy,
    data,
    descend,
    mean,
    population,
    proximal,
    run,
    shares,
)
from rayfed.algorithm import Phase
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.feddyn import FedDyn
from rayfed.algorithms.fedprox import FedProx
from rayfed.algorithms.pfedme import PFedMe
from rayfed.core.optim import SGD, Adam


def test_two_rounds_of_fedprox_by_hand():
    people, model = population(), net()
    server = run(FedProx(mu=0.7), people, model, steps=3, optimizer=SGD(lr=LR, momentum=0.9, weight_decay=0.01))

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9, weight_decay=0.01)

    for _ in range(2):
        locals_ = [descend(model, *data(people, i), 3, loss=proximal(model, 0.7), optimizer=sgd) for i in CLIENTS]
        model = mean(locals_, shares(people))
    assert_weights(server.state["weights"], model)


def test_local_batch_norm_of_fedprox_trains_unpulled():
    people, model = population(), net()
    server = run(FedProx(mu=0.7), people, model, steps=3, rounds=1, batch_norm="local")
    own = server.ctx.task.batch_norm_names
    trained = [descend(model, *data(people, i), 3, loss=proximal(model, 0.7, without=own)) for i in CLIENTS]
    assert_weights(server.state["weights"], mean(trained, shares(people)))
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == own
        assert_weights(state["weights"], trained[i])


@pytest.mark.parametrize(
    ("batch_norm", "ours", "theirs"),
    [
        (True, SGD(lr=LR, momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
        (False, Adam(lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3)),
    ],
)
def test_three_rounds_of_ditto_by_hand(batch_norm, ours, theirs):
    people, model = population(), net(batch_norm)
    server = run(Ditto(mu=0.8, personal_epochs=3), people, model, steps=2, rounds=3, optimizer=ours)
    personal = [model] * 3
    for _ in range(3):
        loss = proximal(model, 0.8)  # the received model, not the one being trained
        personal = [descend(personal[i], *data(people, i), 3, loss=loss, optimizer=theirs) for i in CLIENTS]
        trained = [descend(model, *data(people, i), 2, optimizer=theirs) for i in CLIENTS]
        model = mean(trained, shares(people))
    assert_weights(server.state["weights"], model, atol=2e-5)
    for i, state in server.fleet.states.items():
        assert_weights(state["model"], personal[i], atol=2e-5)


OPTIONS = {"lam": 3.0, "inner_steps": 2, "personal_lr": 0.05, "decay": 0.01}


def one_round(received, x, y, steps):
    v, w = copy.deepcopy(received).train(), copy.deepcopy(received)
    for _ in range(steps):
        for _ in range(2):
            grads = torch.autograd.grad(cross_entropy(v, x, y), list(v.parameters()))
            with torch.no_grad():
                for p, q, g in zip(v.parameters(), w.parameters(), grads, strict=True):
                    p -= 0.05 * (g + 3.0 * (p - q) + 0.01 * p)
        with torch.no_grad():
            for p, q in zip(v.parameters(), w.parameters(), strict=True):
                q -= LR * 3.0 * (q - p)
    for b, c in zip(v.buffers(), w.buffers(), strict=True):
        c.copy_(b)
    return v, w


@pytest.mark.parametrize("beta", [1.0, 1.7])
def test_two_rounds_of_pfedme_by_hand(beta):
    people, model = population(), net()
    server = run(PFedMe(beta=beta, **OPTIONS), people, model, steps=3)
    for _ in range(2):
        pairs = [one_round(model, *data(people, i), 3) for i in CLIENTS]
        before, model = model, mean([w for _, w in pairs], shares(people))
        with torch.no_grad():
            for p, q in zip(model.parameters(), before.parameters(), strict=True):
                p.mul_(beta).add_((1 - beta) * q)
    assert_weights(server.state["weights"], model, atol=5e-6)
    for i, state in server.fleet.states.items():
        assert_weights(state["model"], pairs[i][0], atol=5e-6)


@pytest.mark.parametrize("algorithm", [Ditto(mu=1.0), PFedMe()])
def test_personal_batch_norm_is_neither_pulled_nor_sent(algorithm):
    server = run(algorithm, population(), net(), batch_norm="local")
    names, state = server.ctx.task.batch_norm_names, server.fleet.states[0]
    assert not names & set(server.state["weights"])
    assert set(state["weights"]) == names
    assert all(
        torch.equal(state["weights"][name], state["model"][name]) for name in names if isinstance(algorithm, PFedMe)
    )
    assert names < set(state["model"])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_three_rounds_of_feddyn_by_hand(momentum):
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
def test_feddyn_reaches_the_optimum_of_the_mean(cohort, width):
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
