"""FedPer: body and head trained together, heads stay."""

import copy

from helpers.federations import net
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, population, run, shares
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
