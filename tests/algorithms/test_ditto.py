"""Ditto: a personal model pulled towards what was received, beside FedAvg."""

import pytest
import torch

from helpers.federations import net
from helpers.reference import (
    CLIENTS,
    LR,
    assert_weights,
    cross_entropy,
    data,
    descend,
    mean,
    plan,
    population,
    run,
    shares,
)
from rayfed.algorithm import Phase
from rayfed.algorithms.ditto import Ditto
from rayfed.core.optim import SGD, Adam


def pulled_loss(received, mu):
    fixed = [p.detach().clone() for p in received.parameters()]

    def loss(model, x, y):
        distance = sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), fixed, strict=True))
        return cross_entropy(model, x, y) + mu / 2 * distance

    return loss


@pytest.mark.parametrize(
    ("batch_norm", "ours", "theirs"),
    [
        (True, SGD(lr=LR, momentum=0.9), lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9)),
        (False, Adam(lr=0.01, eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3)),
    ],
)
def test_three_rounds_by_hand(batch_norm, ours, theirs):
    people, model = population(), net(batch_norm)
    server = run(Ditto(mu=0.8, personal_epochs=3), people, model, steps=2, rounds=3, optimizer=ours)
    personal = [model] * 3
    for _ in range(3):
        loss = pulled_loss(model, 0.8)  # the received model, not the one being trained
        personal = [descend(personal[i], *data(people, i), 3, loss=loss, optimizer=theirs) for i in CLIENTS]
        trained = [descend(model, *data(people, i), 2, optimizer=theirs) for i in CLIENTS]
        model = mean(trained, shares(people))
    assert_weights(server.state["weights"], model, atol=2e-5)
    for i, state in server.fleet.states.items():
        assert_weights(state["model"], personal[i], atol=2e-5)


def test_adaptation_trains_the_personal_model_alone():
    people = population()
    ctx = plan(Ditto(personal_epochs=2), people, net()).context(people, "cpu")
    assert Ditto(personal_epochs=2).phases(ctx) == (Phase("personal", epochs=2), ctx.local)
    assert Ditto(personal_epochs=2).adaptation.phases(ctx) == (Phase("personal", steps=2),)


@pytest.mark.parametrize("keep", [False, True])
def test_kept_moments_are_of_both_models(keep):
    people = population()
    server = run(Ditto(), people, net(), optimizer=SGD(lr=LR, momentum=0.9), rounds=1, keep_optimizer=keep)
    state = server.fleet.states[0]
    assert ({"optimizer", "model_optimizer"} <= set(state)) is keep
    if keep:
        pair = [state[key]["momentum"]["fc.weight"] for key in ("optimizer", "model_optimizer")]
        assert all(moment.abs().max() > 0 for moment in pair)


def test_batch_norm_that_stays_is_not_pulled_and_not_sent():
    people = population()
    server = run(Ditto(mu=1.0), people, net(), batch_norm="local")
    names = server.ctx.task.batch_norm_names
    state = server.fleet.states[0]
    assert not names & set(server.state["weights"])
    assert set(state["weights"]) == names
    assert names < set(state["model"])
