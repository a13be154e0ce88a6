"""DANN: both steps by hand, and what the features are pulled towards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.federations import blobs, blueprint, net
from helpers.reference import CLIENTS, LR, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.dann import DANN
from rayfed.core.optim import SGD
from rayfed.core.rng import seed_torch


def first_discriminator(people):
    """Return the discriminator that the server draws in `init`."""
    algorithm = DANN(hidden=[7])
    ctx = blueprint(algorithm, people).context(people, "cpu")
    seed_torch(0, "init")
    return algorithm.init(ctx)["discriminator"]


@pytest.mark.parametrize(("momentum", "keep"), [(0.0, False), (0.9, False), (0.9, True)])
def test_two_rounds_by_hand(momentum, keep):
    people, model, guess = population(), net(), mlp([8, 7, 3])
    guess.load_state_dict(first_discriminator(people))
    algorithm = DANN(hidden=[7], weight_adversary=0.4)
    sgd = SGD(lr=LR, momentum=momentum)
    server = run(algorithm, people, model, steps=2, optimizer=sgd, keep_optimizer=keep)
    kept = {}
    for _ in range(2):
        models, guesses = [], []
        for i in CLIENTS:
            x, y = data(people, i)
            own, discriminator = descend(model, x, y, 0), descend(guess, x, y, 0)
            sgd, other = (torch.optim.SGD(each.parameters(), lr=LR, momentum=momentum) for each in (own, discriminator))
            if keep and i in kept:
                for optimizer, state in zip((sgd, other), kept[i], strict=True):
                    optimizer.load_state_dict(state)
            label = torch.full((len(x),), i)
            for _ in range(2):
                features = descend(own, x, y, 0).features(x).detach()  # a copy's, for its running statistics
                discriminator.zero_grad()
                F.cross_entropy(discriminator(features), label).backward()
                other.step()
                own.zero_grad()
                features = own.features(x)
                loss = F.cross_entropy(own.head(features), y)
                (loss - 0.4 * F.cross_entropy(discriminator(features), label)).backward()
                sgd.step()
            kept[i] = sgd.state_dict(), other.state_dict()
            models.append(own)
            guesses.append(discriminator)
        model, guess = mean(models, shares(people)), mean(guesses, shares(people))
    assert_weights(server.state["weights"], model, atol=1e-5)
    assert_weights(server.state["discriminator"], guess, atol=1e-5)


def test_discriminator_of_the_paper():
    people = blobs()
    found = blueprint(DANN(), people).context(people, "cpu").task.modules["discriminator"].module
    layers = [layer for layer in found if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(8, 256), (256, 256), (256, 4)]
