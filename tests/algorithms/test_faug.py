"""FAug: what the server receives, the generator's literal loss, and a round on local and generated examples."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, net, simulate
from helpers.reference import LR, assert_weights, data, descend, mean, plan, population, run
from rayfed.algorithms.faug import Decoder, Encoder, FAug, balance_classes, draw_seed_examples, vae_loss
from rayfed.core.ids import Moment
from rayfed.core.network import Network, weights_of
from rayfed.core.rng import Streams
from rayfed.engine.device_data import client_data

SMALL = {
    "seed_examples": 2,
    "generated_examples": 7,
    "generated_batch_size": 4,
    "noise": 3,
    "hidden": 8,
    "server_steps": 4,
}


def test_seeds_are_a_few_of_each_class_and_no_more():
    people = blobs()
    ctx = plan(FAug(), people, net()).context(people, "cpu")
    part = client_data(people, 1, ctx.task).train
    torch.manual_seed(0)
    seeds = draw_seed_examples(part, 3)
    held = part.y.bincount(minlength=3)
    assert seeds["y"].bincount(minlength=3).tolist() == held.clamp(max=3).tolist()
    x, y = data(people, 1)
    for own, label in zip(seeds["x"], seeds["y"], strict=True):
        (place,) = torch.nonzero((x == own).all(1))[:, 0].tolist()
        assert y[place] == label
    assert len(seeds["x"].unique(dim=0)) == len(seeds["x"])


def test_the_server_gets_the_seeds_once_and_keeps_none():
    people = population()
    server, records = simulate(plan(FAug(**SMALL), people, net()), people)
    held = [data(people, i)[1].bincount(minlength=3).clamp(max=2).sum().item() for i in range(3)]
    assert records[0].bytes_up == {"seed_examples": sum(held) * (6 * 4 + 8)}
    assert set(records[0].bytes_down) == {"generator", "seed_classes"}
    assert records[0].bytes_down["seed_classes"] == 3 * 3  # a byte for each class
    assert all(set(record.bytes_up) == {"weights"} for record in records[1:])
    assert set(server.state) == {"weights", "generator", "seed_classes"}


def test_classes_are_balance_classes():
    every = torch.ones(3, dtype=torch.bool)
    assert balance_classes(torch.tensor([3, 0, 1]), 6, every).tolist() == [1, 1, 2, 1, 2, 0]
    assert balance_classes(torch.tensor([2, 2]), 3, every[:2]).tolist() == [0, 1, 0]
    assert balance_classes(torch.tensor([3, 0, 1]), 4, torch.tensor([True, False, True])).tolist() == [2, 2, 0, 2]


def test_the_generators_loss_is_its_literal_form():
    torch.manual_seed(0)
    encoder, decoder = Encoder(2, 5, 3, (2, 2)), Decoder(2, 5, 3, (2, 2))
    x, y, noise = torch.randn(6, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2]), torch.randn(6, 2)
    terms = []
    for i in range(6):
        m, log_variance = encoder(x[i : i + 1], y[i : i + 1])[0].chunk(2)
        s = log_variance.exp().sqrt()
        made = decoder((m + s * noise[i])[None], y[i : i + 1])[0]
        own, prior = torch.distributions.Normal(m, s), torch.distributions.Normal(0.0, 1.0)
        terms.append((x[i] - made).square().sum() / 2 + torch.distributions.kl_divergence(own, prior).sum())
    weights = {"encoder": weights_of(encoder), "decoder": weights_of(decoder)}
    found = vae_loss(Network(encoder), Network(decoder), weights, x, y, noise)
    torch.testing.assert_close(found, torch.stack(terms).mean())


@pytest.mark.parametrize("width", [1, 3])
def test_a_round_by_hand(width):
    people, model = population((10, 10, 10)), net()
    server = run(FAug(**SMALL), people, model, rounds=1, batch_size=10, drop_last=True, vmap_clients=width)
    locals_ = []
    for i in range(3):
        made = server.fleet.states[i]["generated"]
        assert made["x"].shape == (7, 6)
        x, y = data(people, i)
        assert torch.equal(made["y"], balance_classes(y.bincount(minlength=3), 7, torch.ones(3, dtype=torch.bool)))
        Streams(0).begin("start", Moment("round", 1), client=i)
        order = torch.randperm(7)
        local = descend(model, x, y, 0)
        sgd = torch.optim.SGD(local.parameters(), lr=LR)
        for step in range(2):
            rows = order[(torch.arange(4) + 4 * step) % 7]
            logits = local(torch.cat([x, made["x"][rows]]))
            loss = 10 * F.cross_entropy(logits[:10], y) + 7 * F.cross_entropy(logits[10:], made["y"][rows])
            local.zero_grad()
            (loss / 17).backward()
            sgd.step()
        locals_.append(local)
    assert_weights(server.state["weights"], mean(locals_, [1 / 3] * 3), atol=2e-6)
