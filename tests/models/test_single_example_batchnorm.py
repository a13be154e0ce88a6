"""Batches of one example: refused in a line where batch norm cannot train on them, and only there."""

from dataclasses import replace

import pytest
from torch import nn

from helpers.federations import Net, blobs, blueprint, net, on_pictures, reshaped, simulate
from rayfed.algorithm import Phase
from rayfed.algorithms.centralised import ERM
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.per_fedavg import PerFedAvg
from rayfed.algorithms.personal_heads import FedRep
from rayfed.core.errors import UsageError
from rayfed.experiments.checks import check_trial
from rayfed.experiments.checks.model import check_adaptation
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

SIZES = (20, 26)  # batches of 5 leave one of the latter


def check(algorithm, people, **changes):
    check_trial(blueprint(algorithm, people, **{"drop_last": False, **changes}), people)


def maps_and_vectors():
    """Batch norm over maps of 2 x 3, for inputs of as many values."""
    model = on_pictures(Net(batch_norm=False))
    model.body = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1), *model.body)
    return model


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (SIZES, {}, "local.batch_size=5: client 1 has 26 training examples, which leave a batch of one example, "),
        (SIZES, {"batch_size": 1}, "local.batch_size=1: client 0 has 20 training .* batch norm cannot train; use at"),
        ((20, 1), {}, r"local.batch_size=5: client 1 has 1 training .* cannot train; partition\.\* must give it more$"),
        ((20, 1), {"drop_last": True}, "local.batch_size=5: client 1 has 1 training examples, which leave a batch of"),
    ],
)
def test_what_cannot_be_trained_is_refused(sizes, changes, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        check(FedAvg(), blobs(2, sizes=sizes), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"drop_last": True},
        {"drop_last": True, "batch_size": 23},  # one client has less than a batch
        {"batch_size": 4},
        {"batch_norm": "frozen"},
        {"model": net(batch_norm=False)},
        {"local": Phase("train", steps=5)},  # of six batches, so that the last one never comes
    ],
)
def test_what_can_be_is_not(changes):
    people = blobs(2, sizes=SIZES)
    simulate(blueprint(FedAvg(), people, **{"drop_last": False, **changes}), people, points=("trained",))


@pytest.mark.parametrize("size", [1, 5])
def test_batch_norm_over_maps_trains_on_one(size):
    people = reshaped(blobs(2, sizes=SIZES), (1, 2, 3))
    for algorithm in (FedAvg(), PerFedAvg()):
        plan = blueprint(algorithm, people, model=maps_and_vectors(), batch_size=size, drop_last=False)
        simulate(plan, people, points=("trained",))


def test_every_phase_counts():
    people, few = blobs(2, sizes=SIZES), Phase("train", steps=5)
    with pytest.raises(UsageError, match=r"^local.batch_size=5: client 1 has 26 training examples"):
        check(FedRep(), people, local=few)  # its head trains for an epoch
    check(FedRep(), people, batch_size=4)
    check(ERM(), people)  # one batch in a round


def test_the_training_before_a_score_counts_where_there_is_one():
    """Five steps of six, which never reach the last batch; an epoch before the score does."""
    people = blobs(2, sizes=SIZES)
    message = r"^local.batch_size=5: client 1 has 26 training examples, which leave a batch .* in evaluate.adapt_epochs"
    for plan in (
        blueprint(FedAvg(), people, local=Phase("train", steps=5), drop_last=False),
        blueprint(ERM(), people, drop_last=False),
    ):
        check_trial(plan, people)
        check_adaptation(Trial(plan, people), 1, of_participants=False)
        for others, of_participants in ((people, True), (replace(people, unseen_clients=1), False)):
            with pytest.raises(UsageError, match=message):
                check_adaptation(Trial(plan, others), 1, of_participants=of_participants)
    local = {"steps": 5, "batch_size": 5, "drop_last": False}
    for more in ({}, {"local.drop_last": True, "evaluate.points": ["adapted"]}):
        make_plan(Config.read({"local": local}, more), Given(clients=people.clients, model=net))
    with pytest.raises(UsageError, match=message):
        make_plan(
            Config.read({"local": local, "evaluate.points": ["adapted"]}), Given(clients=people.clients, model=net)
        )
