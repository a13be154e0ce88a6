"""Methods whose clients keep parts of the model: two rounds by hand, what is scored, and what is sent."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import net, simulate
from helpers.reference import CLIENTS, assert_weights, data, descend, mean, plan, population, run, shares
from rayfed.algorithms.apfl import APFL
from rayfed.algorithms.apple import APPLE
from rayfed.algorithms.ditto import Ditto
from rayfed.algorithms.fedavg import Solo
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.fedfomo import FedFomo
from rayfed.algorithms.fedrod import FedRoD
from rayfed.algorithms.per_fedavg import PerFedAvg
from rayfed.algorithms.personal_heads import FedPer, FedRep
from rayfed.algorithms.pfedme import PFedMe
from rayfed.core.trees import nbytes, without

HEAD = ("fc.weight", "fc.bias")
BATCH_NORM = [name for name in net().state_dict() if name.startswith("body.1.")]


@pytest.mark.parametrize("batch_norm", [True, False])
@pytest.mark.parametrize(
    ("algorithm", "kept"),
    [
        (FedPer(), HEAD),
        (FedBN(), BATCH_NORM),
        (FedBN(weighting="equal"), BATCH_NORM),
        (Solo(), list(net().state_dict())),
    ],
)
def test_two_rounds_by_hand(algorithm, kept, batch_norm):
    if isinstance(algorithm, FedBN) and not batch_norm:
        return
    people, model = population(), net(batch_norm)
    kept = [name for name in kept if name in model.state_dict()]
    server = run(algorithm, people, model, steps=3)
    weights = [1 / 3] * 3 if getattr(algorithm, "weighting", "") == "equal" else shares(people)
    models = [model] * 3
    for _ in range(2):
        trained = [descend(models[i], *data(people, i), 3) for i in CLIENTS]
        common, models = mean(trained, weights).state_dict(), []
        for own in trained:
            own.load_state_dict(common | {name: own.state_dict()[name].clone() for name in kept})
            models.append(own)
    assert set(server.state["weights"]) == set(model.state_dict()) - set(kept)
    if server.state["weights"]:
        assert_weights(server.state["weights"], models[0])
    for i, state in server.fleet.states.items():
        assert set(state["weights"]) == set(kept)
        assert_weights(state["weights"], models[i])


def own_parts_on_the_common_rest(server, state):
    return server.state["weights"] | state["weights"]


def personal_model(server, state):
    return state["model"]


def as_training_left_it(server, state):
    return state["weights"]


def mixture_of_what_was_received(server, state):
    cores = server.state["cores"].items()
    return {name: sum(state["p"][j] * core[j] for j in CLIENTS) for name, core in cores} | state["weights"]


@pytest.mark.parametrize(
    ("algorithm", "model_of"),
    [
        *((kind(), own_parts_on_the_common_rest) for kind in (FedBN, FedPer, FedRep)),
        *((kind(), personal_model) for kind in (Ditto, PFedMe)),
        *((algorithm, as_training_left_it) for algorithm in (Solo(), FedFomo(rating_share=0.5))),
        (APPLE(relation_lr=0.05), mixture_of_what_was_received),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_each_client_is_scored_with_its_own_model(algorithm, model_of):
    people = population()
    server, records = simulate(plan(algorithm, people, net()), people, points=("downloaded",))
    scores = [s for s in records[-1].scores if (s.point, s.split, s.metric) == ("downloaded", "test", "loss")]
    expected = {}
    for i, state in server.fleet.states.items():
        test = people.clients[i].test
        logits = server.ctx.task.predict(model_of(server, state), torch.from_numpy(test.x))
        expected[i] = F.cross_entropy(logits, torch.from_numpy(test.y)).item()
    assert len(set(expected.values())) == len(CLIENTS)
    assert {score.client: score.value for score in scores} == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "stays"),
    [
        *((kind(), ()) for kind in (APFL, Ditto, FedRoD, PFedMe, PerFedAvg)),  # as much as in FedAvg
        *((kind(), HEAD) for kind in (FedPer, FedRep)),
        (FedBN(), BATCH_NORM),
        (Solo(), list(net().state_dict())),
    ],
    ids=lambda part: getattr(part, "name", ""),
)
def test_what_is_personal_is_not_sent(algorithm, stays):
    people = population()
    server, records = simulate(plan(algorithm, people, net()), people)
    sent = len(CLIENTS) * nbytes(without(net().state_dict(), stays))
    assert records[-1].bytes_up == records[-1].bytes_down == ({"weights": sent} if sent else {})
    assert not set(stays) & set(server.state["weights"])
    assert (server.algorithm.global_model(server.ctx, server.state) is None) == bool(stays)
