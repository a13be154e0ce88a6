"""FedFomo: what models a client is sent, how it rates and mixes them, and what the server remembers."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from helpers.federations import blobs, net, simulate
from helpers.reference import CLIENTS, assert_weights, descend, plan, population, run
from rayfed.algorithm import Replies, Reply
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.engine.device_data import client_data, divide

SHARE = 0.5


def fomo(**options):
    """FedFomo that rates on half of a client's examples, which are few here."""
    return FedFomo(rating_share=SHARE, **options)


def people_twice_as_many(seed=0):
    return population((16, 24, 40), seed)


def plain_net():
    return net(batch_norm=False)


def loss_on(part, weights):
    model = plain_net().eval()
    model.load_state_dict(weights)
    return F.cross_entropy(model(torch.from_numpy(part.x)), torch.from_numpy(part.y)).item()


def rating_loss(weights, people, client):
    return loss_on(divide(people.clients[client], SHARE, 0)[1], weights)


def data(people, client):
    train = divide(people.clients[client], SHARE, 0)[0]
    return torch.from_numpy(train.x), torch.from_numpy(train.y)


def distance(a, b):
    names = [name for name, _ in plain_net().named_parameters()]
    return torch.sqrt(sum((a[name] - b[name]).square().sum() for name in names)).item()


def test_the_first_round_is_local_training_and_nothing_is_sent_down():
    people = people_twice_as_many()
    server, records = simulate(plan(fomo(), people, plain_net(), rounds=1), people)
    model = sum(v.numel() * v.element_size() for v in server.ctx.task.initial_weights().values())
    assert records[0].bytes_down == {}
    assert records[0].bytes_up == {"weights": 3 * model}
    for i, state in server.fleet.states.items():
        own = descend(plain_net(), *data(people, i), 2)
        assert_weights(state["weights"], own)
        assert_weights(server.state["models"][i], own)
        assert_weights(state["old"], plain_net())
    assert torch.equal(server.state["ratings"], torch.eye(3))


def test_the_second_round_by_hand():
    people = people_twice_as_many()
    first = run(fomo(models=2), people, plain_net(), rounds=1, steps=5)
    server, records = simulate(plan(fomo(models=2), people, plain_net(), rounds=2, steps=5), people)
    models, start = first.state["models"], first.ctx.task.initial_weights()
    size = sum(v.numel() * v.element_size() for v in start.values())
    assert records[1].bytes_down == {"models": 3 * 2 * size}
    assert records[1].bytes_up == {"weights": 3 * size, "ratings": 3 * 2 * 4}
    ratings = torch.eye(3)
    some = 0
    for i in CLIENTS:
        sent = [i, min(set(CLIENTS) - {i})]  # of equal P the lower number
        weights = [
            (rating_loss(start, people, i) - rating_loss(models[n], people, i)) / (distance(models[n], start) + 1e-5)
            for n in sent
        ]
        for n, w in zip(sent, weights, strict=True):
            ratings[i, n] += w  # below 0, too
        some += sum(w > 0 for w in weights)
        weights = [max(0.0, w) for w in weights]
        total = sum(weights)
        weights = [w / total for w in weights] if total else [1.0, 0.0]  # of none that is better, its own stays
        pairs = list(zip(sent, weights, strict=True))
        mixed = {name: sum(w * models[n][name] for n, w in pairs) for name in start}
        received = plain_net()
        received.load_state_dict(mixed)
        state = server.fleet.states[i]
        assert_weights(state["old"], received)
        assert_weights(state["weights"], descend(received, *data(people, i), 5))
    assert some == 5  # one model is worse for the client that rates it than its old one
    assert ratings.min() < 0
    torch.testing.assert_close(server.state["ratings"], ratings)


def test_a_model_that_was_worse_makes_room_for_one_never_tried():
    state = fomo(models=2).init(plan(fomo(), population(), plain_net()).context(population(), "cpu"))
    state = state | {"seen": torch.ones(3, dtype=torch.bool)}
    assert fomo(models=2).best_rated(state, 0) == [0, 1]
    reply = Reply(0, 8, {"weights": {}, "ratings": torch.tensor([0.2, -0.1])})
    after = fomo(models=2).aggregate(None, state, Replies({}, [reply]))
    assert fomo(models=2).best_rated(after, 0) == [0, 2]


def test_the_best_rated_are_sent_and_only_those_that_have_come():
    state = {"ratings": torch.tensor([[1.0, 0.5, 2.0, 0.5]]), "seen": torch.tensor([True, True, True, True])}
    assert fomo(models=3).best_rated(state, 0) == [2, 0, 1]
    assert fomo(models=9).best_rated(state, 0) == [2, 0, 1, 3]
    assert fomo(models=3).best_rated(state | {"seen": torch.tensor([True, False, False, True])}, 0) == [0, 3]
    server = run(fomo(), population(), plain_net(), rounds=1, cohort=1)
    assert server.state["seen"].tolist() == [i in server.sample(1) for i in CLIENTS]


def unseen(models):
    """(context, state, what it is sent, everyone) of client 3, which joins the others after training."""
    people = replace(blobs(4, sizes=(16, 24, 40, 32)), unseen_clients=1)
    ctx = plan(fomo(), people, plain_net()).context(people, "cpu")
    ctx = ctx.at(client=3, round=2, data=client_data(people, 3, ctx.task, held_out_share=SHARE))
    return ctx, fomo().join(ctx), {"models": models}, people


def test_an_unseen_client_starts_from_the_mixture_of_what_it_is_sent():
    ctx, client, _, people = unseen([])
    better = [dict(descend(plain_net(), *data(people, 3), steps).state_dict()) for steps in (3, 9)]
    down = {"models": better}
    start = ctx.task.initial_weights()
    gains = [
        (rating_loss(start, people, 3) - rating_loss(model, people, 3)) / (distance(model, start) + 1e-5)
        for model in better
    ]
    assert min(gains) > 0
    mixed = {name: sum(w * m[name] for w, m in zip(gains, better, strict=True)) / sum(gains) for name in start}
    downloaded = fomo().downloaded_model(ctx, client, down)
    torch.testing.assert_close(downloaded, mixed)
    work = fomo().start(ctx.at(stage="final"), client, down)
    assert all(torch.equal(work["weights"][name], downloaded[name]) for name in start)
    torch.testing.assert_close(work["ratings"], torch.tensor(gains))
    # a participant is scored with its own model
    own = fomo().downloaded_model(ctx.at(client=2), client, down)
    assert all(torch.equal(own[name], start[name]) for name in start)


def test_nobody_trains_on_the_examples_that_rate():
    """Of 8, 12 and 20 examples, a share of 0.25 rates; the records count and score the other 6, 9 and 15."""
    people = population()
    algorithm = FedFomo(rating_share=0.25)
    server, records = simulate(plan(algorithm, people, plain_net(), rounds=1), people)
    assert server.examples.tolist() == [6, 9, 15]
    assert {s.client: s.n for s in records[0].scores if s.metric == "loss" and s.split == "train"} == {
        0: 6,
        1: 9,
        2: 15,
    }
    for client in people.clients:
        train, held_out = divide(client, 0.25, 0)
        rows = np.concatenate([train.x, held_out.x])
        assert sorted(map(tuple, rows)) == sorted(map(tuple, client.train.x))
        assert not np.array_equal(held_out.x, divide(client, 0.25, 1)[1].x)
