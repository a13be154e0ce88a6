"""SOLO: every client on its own, nothing sent."""

import pytest
import torch

from helpers.federations import net
from helpers.reference import CLIENTS, LR, assert_weights, data, descend, population, run
from rayfed.algorithms.solo import Solo
from rayfed.core.optim import SGD


@pytest.mark.parametrize("batch_norm", [True, False])
def test_every_client_trains_alone_and_goes_on_where_it_was(batch_norm):
    people, model = population(), net(batch_norm)
    states = run(Solo(), people, model, steps=2, rounds=3).fleet.states
    for i in CLIENTS:
        alone = descend(model, *data(people, i), 6)
        assert_weights(states[i]["weights"], alone)
        assert states[i]["weights"].keys() == alone.state_dict().keys()


@pytest.mark.parametrize("keep", [None, False])
def test_momentum_goes_on_over_rounds_unless_told_otherwise(keep):
    people, model = population(), net()
    optimizer = SGD(lr=LR, momentum=0.9)
    states = run(Solo(), people, model, steps=3, rounds=2, optimizer=optimizer, keep_optimizer=keep).fleet.states

    def momentum(parameters):
        return torch.optim.SGD(parameters, lr=LR, momentum=0.9)

    x, y = data(people, 0)
    if keep is None:
        alone = descend(model, x, y, 6, optimizer=momentum)
    else:
        alone = descend(descend(model, x, y, 3, optimizer=momentum), x, y, 3, optimizer=momentum)
    assert_weights(states[0]["weights"], alone)
