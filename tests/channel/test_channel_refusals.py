"""What a channel refuses, in one line and before anything starts, and which methods take which part."""

import contextlib
import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from helpers.algorithm_cases import CASES, algorithm_of, people_of, plan_of
from helpers.federations import as_mappings, blobs, blueprint
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.experiments.checks.channel import channel_obstacles
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan

SMALL = {"model": {"name": "mlp", "hidden": [4]}, "data": {"per_domain": 20, "domains": ["plain", "font"]}}
SMALL |= {"partition": {"name": "iid", "clients": 8}, "local.batch_size": 2}
NOISE = {"privacy.sigma": 1, "privacy.delta": 0.01}
PRIVATE = {"privacy.epsilon": 8, "privacy.delta": 0.01, "algorithm.weighting": "equal"}
LATE = {"schedule": {"name": "buffered", "concurrency": 4, "buffer": 2}, "clock.step_seconds": 1}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        # ε and δ
        ({"privacy.delta": 0.01}, "privacy: give epsilon or sigma, and not both"),
        ({**PRIVATE, "privacy.sigma": 1}, "privacy: give epsilon or sigma, and not both"),
        ({"privacy.epsilon": 8}, "privacy.delta: needed for a guarantee"),
        (
            {**PRIVATE, "privacy.delta": 0.125},
            "privacy.delta=0.125: must be less than one over the number of clients, 0.125",
        ),
        (
            {**PRIVATE, "privacy.epsilon": 1e-6, "privacy.delta": 1e-9},
            "privacy.epsilon=1e-06: no amount of noise keeps 10 steps below ε=",
        ),
        ({**PRIVATE, "privacy.local": True, "privacy.quantile": 0.5}, "privacy.quantile: needs a trusted server"),
        (
            {**PRIVATE, "privacy.quantile": 0.5, "privacy.bits_noise": 0.01},
            "privacy.bits_noise=0.01: must be more than ",
        ),
        ({"privacy.name": "laplace"}, "privacy.epsilon: required"),
        # what the server would learn
        (NOISE, "privacy: algorithm.name=fedavg weighs clients by their numbers of "),
        (
            {**PRIVATE, "algorithm": {"name": "fedproto"}},
            "privacy: algorithm.name=fedproto averages nothing, and sends pro",
        ),
        (
            {"algorithm": {"name": "dbe", "base": {"name": "fedavg", "weighting": "equal"}}, **NOISE},
            "privacy: algorithm.name=dbe sends mean before round 1, which would not be protected",
        ),
        (
            {"algorithm": {"name": "mixup"}, **NOISE},
            "privacy: algorithm.name=mixup weighs clients by their numbers of examples, which would not be protected; "
            "give algorithm.base.weighting=equal",
        ),
        (
            {**PRIVATE, "algorithm.name": "dp_fedbn", "model": {"name": "digits_cnn", "width": 0.125}},
            "privacy: algorithm.name=dp_fedbn has privacy of its own",
        ),
        ({**PRIVATE, "sampling.name": "by_size", "cohort": 4}, "sampling.name: BySize uses what clients report"),
        (
            {**PRIVATE, "availability.dropout": 0.1},
            "availability.dropout: privacy.* needs cohorts that do not depend on",
        ),
        # cohorts
        ({**PRIVATE, "cohort": 1}, "privacy: a cohort of one client has no others to hide among"),
        ({"robust.name": "median", "cohort": 1}, "robust.name=median: a cohort of one client has no others to compare"),
        (
            {"robust.name": "krum", "attack.name": "ipm", "attack.share": 0.4},
            "robust.name=krum: needs 11 clients for 4 that attack, and a cohort has 8",
        ),
        (
            {"robust.name": "bulyan", "robust.byzantine": 2},
            "robust.name=bulyan: needs 11 clients for 2 that attack, and a cohort has 8",
        ),
        (
            {"robust.name": "krum", "availability.dropout": 0.1},
            "availability.dropout: robust.name=krum needs cohorts of one",
        ),
        (
            {"robust.name": "krum", "sampling.name": "poisson", "cohort": 4},
            "sampling.name=poisson: robust.name=krum needs cohorts of one size",
        ),
        (
            {"robust.name": "median", "sampling.name": "by_size", "cohort": 4},
            "sampling.name: BySize weighs clients in the mean, whose place robust.name=median takes",
        ),
        (
            {"attack.name": "ipm", "sampling.name": "by_size", "cohort": 4},
            "sampling.name: BySize weighs clients in the mean, whose place attack.name=ipm takes",
        ),
        (
            {**PRIVATE, "robust.name": "median", "sampling.name": "poisson", "cohort": 4},
            "sampling.name=poisson: robust.name=median with privacy.* needs cohorts of one size",
        ),
        (
            {"privacy.name": "laplace", "privacy.epsilon": 8, "robust.name": "median", "algorithm.weighting": "equal"},
            "privacy.name=laplace: robust.name=median bounds what a client can change in L2 alone",
        ),
        # methods without the updates that a part works on
        ({"compression.name": "topk", "algorithm.name": "solo"}, "compression: algorithm.name=solo sends nothing"),
        (
            {"attack.name": "ipm", "algorithm.name": "fedfomo"},
            "attack: algorithm.name=fedfomo averages nothing, and sends we",
        ),
        (
            {"robust.name": "median", "algorithm.name": "apple"},
            "robust: algorithm.name=apple averages nothing, and sends we",
        ),
        (
            {"robust.name": "median", "algorithm.name": "afl"},
            "robust: algorithm.name=afl lets clients' own reports decide",
        ),
        ({"attack.name": "label_flip", "algorithm.name": "solo"}, "attack: algorithm.name=solo sends nothing"),
        # attackers
        (
            {"attack.name": "noise", "attack.clients": [1, 99]},
            "attack.clients: there is no client 99 that takes part; known: 0",
        ),
        ({"attack.name": "noise", "attack.share": 0.99}, "attack.share=0.99: leaves no honest client of 8"),
        (
            {"attack.name": "backdoor", "attack.size": 40},
            "attack.size=40: the trigger is larger than an image of side 28",
        ),
        ({"attack.name": "backdoor", "attack.target": 10}, "attack.target=10: there are 10 classes, from 0 on"),
        ({"metrics.attack_success.size": 40}, "metrics.attack_success.size=40: the trigger is larger than an image"),
        # the downlink
        ({"compression": {"name": "topk", "down": "qsgd"}}, "compression.down.name=qsgd: draws random numbers"),
        (
            {"compression": {"name": "topk", "down": {"name": "cast", "down": "cast"}}},
            "compression.down.down: what the server sends is encoded once",
        ),
        (
            {"compression": {"name": "topk", "down": "cast"}, **LATE},
            "compression.down: clients that start at different times",
        ),
        (
            {"compression": {"name": "topk", "down": "cast"}, "clock.down_mbps": 1},
            "compression.down: the clock counts whole downloads",
        ),
        (
            {**PRIVATE, "privacy.quantile": 0.5, "privacy.bits_noise": 9, **LATE},
            "privacy.quantile: clients that started earlier would be clipped",
        ),
        # names and keys
        ({"compression.share": 0.1}, "compression.share: needs compression.name, one of topk, randk, qsgd, sign, cast"),
        ({"attack.share": 0.1}, "attack.share: needs attack.name, one of label_flip, noise, "),
        ({"robust.byzantine": 1}, "robust.byzantine: needs robust.name, one of norm_bound, "),
        ({"robust.name": "crum"}, "robust.name=crum: did you mean krum?"),
        (
            {"compression": {"name": "topk", "down": {"name": "cast", "typ": "int8"}}},
            "compression.down.typ: no such key",
        ),
    ],
)
def test_a_channel_that_cannot_work_is_refused(given, message):
    with pytest.raises(UsageError) as caught:
        make_plan(Config.read(SMALL, given))
    assert str(caught.value).startswith(message), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"attack.name": "backdoor"},
            "attack.size=3: the trigger is put on images [channels, height, width], and inputs",
        ),
        ({"metrics.attack_success": True}, "metrics.attack_success.size=3: the trigger is put on images"),
    ],
)
def test_vectors_have_no_place_for_a_trigger(given, message):
    with pytest.raises(UsageError) as caught:
        make_plan(Config.read(given, {"model.name": "mlp"}), Given(clients=as_mappings(blobs(sizes=(20,)))))
    assert str(caught.value).startswith(message), str(caught.value)


@pytest.mark.parametrize("part", ["label_flip", "backdoor"])
def test_poisoning_needs_classes(part):
    some = np.ones((20, 6), np.float32), np.ones(20, np.float32)
    numbers = [{"train": some, "test": some}] * 3
    with pytest.raises(UsageError, match=f"^attack.name={part}: needs labels that are classes of whole examples"):
        make_plan(Config.read({"attack.name": part, "loss.name": "mse", "model.name": "mlp"}), Given(clients=numbers))


def test_weights_that_are_not_finite_are_neither_clipped_nor_hidden():
    def masked():
        module = nn.Sequential(nn.Linear(6, 3))
        module.register_buffer("mask", torch.full((1,), -torch.inf))
        return module

    with pytest.raises(UsageError, match=r"^model.name: privacy.name=gaussian clips and adds noise to real, finite"):
        make_plan(Config.read(PRIVATE), Given(clients=as_mappings(blobs(sizes=(20,))), model=masked))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts(FedAvg):
    """FedAvg that averages the numbers of clients' steps as well, or these alone."""

    name: ClassVar[str] = "counts"
    averaged: ClassVar[tuple[str, ...]] = ("steps",)

    def finish(self, ctx, work, client, down, data):
        return client, {"steps": {"n": torch.tensor(3)}}

    def aggregate(self, ctx, server, replies):
        return server


@pytest.mark.parametrize("part", ["compression", "attack", "robust", "privacy"])
def test_a_method_that_averages_integers_alone_is_refused(part):
    people = blobs()
    plan = blueprint(Counts(), people)
    reason = "averages integers alone, which have no update"
    assert channel_obstacles(Trial(plan, people), plan.algorithm)[part] == reason


# Which methods take which part, as docs/algorithms.md has it

EVERY_PART = {"privacy", "compression", "attack", "robust"}
NO_UPDATES = {"solo", "fedfomo", "apple", "fedproto", "adcol", "fada", "dp_adcol", "local_dp_adcol"}
BY_REPORTED_LOSSES = {"afl", "gen_afl", "vm", "group_dro", "erm", "central_group_dro", "mm_rex", "v_rex", "irm"}
NOT_PRIVATE = {
    "flora": "sends factors of every client",
    "het_lora": "sends factors of every client",
    "dbe": "sends mean before round 1",
    "feddebias": "sends means before round 1",
    "harmofl": "sends amplitude before round 1",
    "fedgen": "sends counts before round 1",
    "fedmix": "sends means before round 1",
    "faug": "sends seed_examples before round 1",
    "dp_fedbn": "has privacy of its own",
    "gaussian_dp_fedbn": "has privacy of its own",
    **dict.fromkeys(BY_REPORTED_LOSSES, "sends loss of every client"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_which_parts_a_method_takes_follows_from_what_it_sends(name):
    case = CASES[name]
    method = algorithm_of(case)
    if hasattr(method, "weighting") and dataclasses.fields(method):
        with contextlib.suppress(TypeError, ValueError):  # of methods whose weights are fixed
            method = dataclasses.replace(method, weighting="equal")
    if name == "mixup":
        method = dataclasses.replace(method, base=dataclasses.replace(method.base, weighting="equal"))
    plan = plan_of(case, algorithm=method)
    found = channel_obstacles(Trial(plan, people_of(plan.algorithm)), plan.algorithm)
    refused = {part: why for part, why in found.items() if why}
    if name in NO_UPDATES:
        assert set(refused) == EVERY_PART
        assert all(why.startswith(("averages nothing", "sends nothing")) for why in refused.values())
        return
    expected = ({"privacy"} if name in NOT_PRIVATE else set()) | ({"robust"} if name in BY_REPORTED_LOSSES else set())
    assert set(refused) == expected
    assert refused.get("privacy", "").startswith(NOT_PRIVATE.get(name, ""))


@pytest.mark.parametrize("attack", ["label_flip", "backdoor"])
def test_false_data_go_with_methods_that_average_nothing(attack):
    make_plan(Config.read(SMALL, {"attack.name": attack, "algorithm.name": "adcol"}))
