"""FADA: a round by hand, the spread that weighs the sources, unused labels. DANN: both steps by hand."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from threadpoolctl import threadpool_limits

from helpers.federations import blueprint, net
from helpers.reference import CLIENTS, LR, assert_weights, data, descend, mean, population, run, shares
from rayfed.algorithms import fada
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.dann import DANN
from rayfed.algorithms.fada import FADA, cluster_spread
from rayfed.core.optim import SGD
from rayfed.core.rng import Streams
from rayfed.core.trees import unstack
from rayfed.data.population import Examples

SOURCES, TARGET = (0, 2), 1


def first_discriminators(people):
    """Return the discriminators that the server draws in `init`, as modules."""
    algorithm = FADA(target=TARGET, hidden=[7])
    ctx = blueprint(algorithm, people).context(people, "cpu")
    Streams(0).begin("init")
    modules = []
    for weights in unstack(algorithm.init(ctx)["discriminators"], 2):
        modules.append(mlp([8, 7, 2]))
        modules[-1].load_state_dict(weights)
    return modules


@pytest.mark.parametrize("width", [1, 3])
def test_a_round_of_fada_by_hand(width, monkeypatch):
    monkeypatch.setattr(fada, "cluster_spread", lambda features, clusters, seed: float(features.mean()) * clusters)
    people, model = population((10, 10, 10)), net(batch_norm=False)
    algorithm = FADA(target=TARGET, hidden=[7], weight_adversary=0.4, server_lr=0.3)
    server = run(algorithm, people, model, rounds=1, batch_size=10, drop_last=True, vmap_clients=width)

    pairs = dict(zip(SOURCES, first_discriminators(people), strict=True))
    wrong = {True: 1, False: 0}  # the target is trained to look like a source, a source like the target

    def trained(i):
        x, y = data(people, i)
        own = descend(model, x, y, 0)
        sgd = torch.optim.SGD(own.parameters(), lr=LR)
        for _ in range(2):
            z = own.features(x)
            label = torch.full((len(x),), wrong[i == TARGET])
            found = [F.cross_entropy(pairs[s](z), label) for s in (SOURCES if i == TARGET else (i,))]
            loss = 0.4 * sum(found) / len(found)
            if i != TARGET:
                loss = loss + F.cross_entropy(own.head(z), y)
            own.zero_grad()
            loss.backward()
            sgd.step()
        return own

    models = {i: trained(i) for i in range(3)}
    x = data(people, TARGET)[0]
    spreads = torch.tensor([float(models[s].features(x).detach().mean()) * 3 for s in SOURCES])
    alpha = torch.softmax(-spreads, 0)
    expected = descend(model, *data(people, 0), 0)
    with torch.no_grad():
        for name, value in expected.named_parameters():
            value.copy_(sum(a * models[s].get_parameter(name) for a, s in zip(alpha, SOURCES, strict=True)))
            if not name.startswith("fc"):
                value += models[TARGET].get_parameter(name) - model.get_parameter(name)
    assert_weights(server.state["weights"], expected, atol=2e-6)

    z = {i: models[i].features(data(people, i)[0]).detach() for i in range(3)}
    for s, found in zip(SOURCES, unstack(server.state["discriminators"], 2), strict=True):
        guess = F.cross_entropy(pairs[s](torch.cat([z[s], z[TARGET]])), torch.tensor([1] * 10 + [0] * 10))
        pairs[s].zero_grad()
        guess.backward()
        torch.optim.SGD(pairs[s].parameters(), lr=0.3).step()
        assert_weights(found, pairs[s], atol=2e-6)


def test_spread_is_the_sum_over_pairs_within_clusters():
    torch.manual_seed(0)
    clouds = [centre + 0.1 * torch.randn(n, 2) for centre, n in ((0.0, 4), (9.0, 3))]
    pairs = sum(torch.cdist(cloud, cloud).square().sum() / (2 * len(cloud)) for cloud in clouds)
    assert cluster_spread(torch.cat(clouds), 2, seed=1) == pytest.approx(float(pairs) / 7, rel=1e-4)
    assert cluster_spread(torch.ones(3, 2), 5, seed=1) == 0


def test_spread_has_the_same_bits_for_any_number_of_threads():
    features, found = torch.randn(600, 64, generator=torch.Generator().manual_seed(0)), []
    for threads in (1, 4):
        with threadpool_limits(threads):
            found.append([cluster_spread(features, 5, seed) for seed in range(6)])
    assert found[0] == found[1]


def test_the_targets_labels_are_not_used():
    people = population()
    train = people.clients[TARGET].train
    other = replace(people.clients[TARGET], train=Examples(train.x, (train.y + 1) % 3))
    relabelled = replace(people, clients=(people.clients[0], other, people.clients[2]))
    hashes = [run(FADA(target=TARGET, hidden=[7]), some, net()).state_hash() for some in (people, relabelled)]
    assert hashes[0] == hashes[1]
    other_target = [run(FADA(target=0, hidden=[7]), some, net()).state_hash() for some in (people, relabelled)]
    assert other_target[0] != other_target[1]


def first_discriminator(people):
    """Return the discriminator that the server draws in `init`."""
    algorithm = DANN(hidden=[7])
    ctx = blueprint(algorithm, people).context(people, "cpu")
    Streams(0).begin("init")
    return algorithm.init(ctx)["discriminator"]


@pytest.mark.parametrize(("momentum", "keep"), [(0.0, False), (0.9, False), (0.9, True)])
def test_two_rounds_of_dann_by_hand(momentum, keep):
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
