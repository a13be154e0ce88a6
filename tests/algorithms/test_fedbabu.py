"""FedBABU: bodies under one head that nobody trains, then everyone fine-tunes the whole model."""

import copy

import pytest
import torch

from helpers.federations import net, simulate
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithm import Phase
from rayfed.algorithms.fedbabu import FedBABU
from rayfed.core.optim import SGD, Adam

HEAD = ("fc.weight", "fc.bias")
CHANGES = {"optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}  # decay must leave the head alone, too


def theirs(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def test_two_rounds_and_the_end_by_hand():
    people, model = population(), net()
    server = run(FedBABU(finetune_epochs=4), people, model, steps=3, **CHANGES)
    body = [n for n, _ in model.named_parameters() if n not in HEAD]
    for _ in range(2):
        trained = [descend(model, *data(people, i), 3, names=body, optimizer=theirs) for i in CLIENTS]
        model = mean(trained, shares(people))
    assert torch.allclose(model.fc.weight, net().fc.weight)
    assert_weights(server.state["weights"], model)
    assert not set(HEAD) & set(server.state["weights"])
    for i, state in server.fleet.states.items():
        tuned = descend(model, *data(people, i), 4, optimizer=theirs)
        assert_weights(state["model"], tuned)
        assert_weights(state["weights"], net())  # the head that is kept is still everyone's
        assert not torch.equal(state["model"]["fc.weight"], net().fc.weight)


def test_fine_tuning_does_not_go_on_with_the_optimiser_of_the_rounds():
    """Whose count of steps is not that of the head's moments, which torch's Adam counts apart."""
    people, model, adam = population(), net(batch_norm=False), Adam(lr=0.01, eps=1e-3)
    server = run(FedBABU(finetune_epochs=2), people, model, rounds=2, steps=5, optimizer=adam, keep_optimizer=True)
    model.load_state_dict(server.state["weights"], strict=False)
    for i in CLIENTS:
        tuned = descend(model, *data(people, i), 2, optimizer=lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3))
        assert_weights(server.fleet.states[i]["model"], tuned)


def test_what_is_sent_and_scored_when():
    people = population()
    points = ("global", "downloaded", "adapted")
    server, records = simulate(plan(FedBABU(finetune_epochs=3), people, net()), people, points=points)
    assert [record.stage for record in records] == ["round", "round", "final"]
    task = server.ctx.task
    body = sum(v.numel() * v.element_size() for n, v in task.initial_weights().items() if n not in HEAD)
    assert [record.bytes_up for record in records] == [{"weights": 3 * body}, {"weights": 3 * body}, {}]
    assert all(record.bytes_down == {"weights": 3 * body} for record in records)

    def losses(record, point):
        chosen = [s for s in record.scores if s.point == point and s.client >= 0 and s.metric == "loss"]
        return {(s.client, s.split): s.value for s in chosen if s.split != "train"}

    for record in records[:2]:
        assert losses(record, "downloaded") == losses(record, "global") != losses(record, "adapted")
    # the same body, so the same after evaluate.adapt_epochs, however long the fine-tuning takes
    assert losses(records[2], "adapted") == losses(records[1], "adapted")
    assert losses(records[2], "adapted") != losses(records[2], "downloaded") != losses(records[2], "global")
    model = copy.deepcopy(net())
    model.load_state_dict(server.fleet.states[1]["model"])
    test = people.clients[1].test
    expected = torch.nn.functional.cross_entropy(model.eval()(torch.from_numpy(test.x)), torch.from_numpy(test.y))
    assert losses(records[2], "downloaded")[1, "test"] == pytest.approx(expected.item(), abs=1e-6)


def test_phases():
    people = population()
    algorithm = FedBABU(finetune_epochs=7)
    ctx = plan(algorithm, people, net()).context(people, "cpu")
    assert algorithm.phases(ctx.at(round=2)) == (ctx.local,)
    assert algorithm.adaptation.phases(ctx) == (Phase("personal", steps=2),)
    assert algorithm.final_exchanges[0].phases(ctx) == (Phase("personal", epochs=7),)
