"""FedRep: head first, then body. FedBABU: bodies under one head, then every client fine-tunes the whole model."""

import copy
from dataclasses import replace

import pytest
import torch

from helpers.federations import net, new_server, simulate
from helpers.reference import CLIENTS, LR, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.personal_heads import FedBABU, FedRep
from rayfed.core.optim import SGD, Adam

HEAD = ("fc.weight", "fc.bias")
OPTIMIZERS = {
    "sgd": (SGD(lr=LR), lambda p: torch.optim.SGD(p, lr=LR)),
    "momentum": (
        SGD(lr=LR, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=LR, momentum=0.9, weight_decay=0.1),
    ),
    "adam": (Adam(lr=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
}


@pytest.mark.parametrize(("name", "shared"), [*((name, "body") for name in OPTIMIZERS), ("momentum", "head")])
def test_two_rounds_of_fedrep_by_hand(name, shared):
    ours, theirs = OPTIMIZERS[name]
    people, model = population(), net(batch_norm=False)
    server = run(FedRep(head_epochs=3, body_epochs=2, shared=shared), people, model, optimizer=ours)
    body = [n for n, _ in model.named_parameters() if n not in HEAD]
    kept, sent = (HEAD, body) if shared == "body" else (body, HEAD)
    models = [model] * 3
    for _ in range(2):
        trained = []
        for i in CLIENTS:
            first = descend(models[i], *data(people, i), 3, names=kept, optimizer=theirs)
            trained.append(descend(first, *data(people, i), 2, names=sent, optimizer=theirs))
        common = mean(trained, shares(people)).state_dict()
        models = [copy.deepcopy(own) for own in trained]
        for own in models:
            own.load_state_dict(common | {n: own.state_dict()[n].clone() for n in kept})
    atol = 2e-5 if name == "adam" else 1e-6
    assert_weights(server.state["weights"], models[0], atol=atol)
    assert set(server.state["weights"]) == set(sent)
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == set(kept)
        assert_weights(state["weights"], models[i], atol=atol)


@pytest.mark.parametrize(("adapted", "moves"), [("head", False), ("both", True)])
def test_an_unseen_clients_body_moves_only_if_both_parts_adapt(adapted, moves):
    people = replace(population(), unseen_clients=1)
    model = net(batch_norm=False)
    how = plan(FedRep(adapted=adapted, head_epochs=1), people, model, cohort=2)
    server = new_server(how, people, points=("downloaded",))
    record = list(server.run())[-1]
    start = copy.deepcopy(model)
    start.load_state_dict(model.state_dict() | server.state["weights"])
    tuned = descend(start, *data(people, 2), 1, names=HEAD)
    if moves:
        body = [n for n, _ in model.named_parameters() if n not in HEAD]
        tuned = descend(tuned, *data(people, 2), 1, names=body)
    test = people.clients[2].test
    expected = torch.nn.functional.cross_entropy(tuned.eval()(torch.from_numpy(test.x)), torch.from_numpy(test.y))
    found = next(
        s.value for s in record.scores if s.unseen and (s.split, s.point, s.metric) == ("test", "adapted", "loss")
    )
    assert found == pytest.approx(expected.item(), abs=1e-6)


CHANGES = {"optimizer": SGD(lr=0.1, momentum=0.9, weight_decay=0.1)}  # decay must leave the head alone, too


def theirs(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def test_two_rounds_of_fedbabu_and_the_end_by_hand():
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


def test_what_fedbabu_sends_and_scores_when():
    people = population()
    points = ("global", "downloaded", "adapted")
    server, records = simulate(plan(FedBABU(finetune_epochs=3), people, net()), people, points=points)
    assert [record.stage for record in records] == ["round", "round", "final"]
    assert [set(record.bytes_up) for record in records] == [{"weights"}, {"weights"}, set()]

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
