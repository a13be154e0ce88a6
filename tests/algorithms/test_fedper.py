"""FedPer: body and head trained together, heads stay."""

import copy

import pytest
import torch

from helpers.federations import net, simulate
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.fedper import FedPer

HEAD = ("fc.weight", "fc.bias")


def test_two_rounds_by_hand():
    people, model = population(), net()
    server = run(FedPer(), people, model, steps=3)
    models = [model] * 3
    for _ in range(2):
        trained = [descend(models[i], *data(people, i), 3) for i in CLIENTS]
        common = mean(trained, shares(people)).state_dict()
        models = [copy.deepcopy(own) for own in trained]
        for own in models:
            own.load_state_dict(common | {n: own.state_dict()[n].clone() for n in HEAD})
    assert_weights(server.state["weights"], models[0])
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == set(HEAD)
        assert_weights(state["weights"], models[i])


def test_heads_are_not_sent_and_are_what_is_scored():
    people = population()
    server, records = simulate(plan(FedPer(), people, net()), people)
    body = sum(v.numel() * v.element_size() for n, v in server.ctx.task.initial_weights().items() if n not in HEAD)
    assert records[-1].bytes_up == records[-1].bytes_down == {"weights": 3 * body}
    model = server.state["weights"] | server.fleet.states[2]["weights"]
    test = people.clients[2].test
    hits = server.ctx.task.predict(model, torch.from_numpy(test.x)).argmax(1) == torch.from_numpy(test.y)
    found = {(s.point, s.client, s.split, s.metric): s.value for s in records[-1].scores}
    assert found["downloaded", 2, "test", "accuracy"] == pytest.approx(hits.double().mean().item())
    assert server.algorithm.global_model(server.ctx, server.state) is None
