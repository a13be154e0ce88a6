"""What `local.privacy` refuses, in one line and before anything starts, and what it says of a plan."""

import pytest
import torch
import torch.nn.functional as F
from opacus.accountants import RDPAccountant
from torch import nn

import rayfed
from helpers.federations import as_mappings, blobs
from rayfed.algorithms import ALGORITHMS
from rayfed.algorithms.common.private_training import private_training_of
from rayfed.algorithms.fedavg import FedAvg
from rayfed.augment.base import Augment
from rayfed.core.errors import UsageError
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.plan_record_privacy import record_privacy_notes
from rayfed.experiments.run_summary import run_summary

SMALL = {"model": {"name": "mlp", "hidden": [4]}, "data": {"per_domain": 30, "domains": ["plain", "font"]}}
SMALL |= {"local.batch_size": 5, "rounds": 3}
NOISE = {"local.privacy": {"noise_multiplier": 1.0, "delta": 1e-3}}
TAKES = {
    *("fedavg", "solo", "fedprox", "scaffold", "moon", "feddyn", "fedavgm", "fedadagrad", "fedadam", "fedyogi"),
    *("fedper", "fedrep", "fedbabu", "ditto", "apple", "partialfed", "pfedavg", "erm"),
}
"""The methods that take it, with a model without batch norm."""


def plan_of(given=None):
    base = SMALL | {key: {} for key in given or {} if key in SMALL}
    return make_plan(Config.read(base, NOISE, given or {}))


def refusal(given=None):
    with pytest.raises(UsageError) as error:
        plan_of(given)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"local.privacy": {"delta": 0.01}}, "local.privacy: give noise_multiplier or target_epsilon, and not both"),
        ({"local.privacy": {"noise_multiplier": 1, "target_epsilon": 1}}, "local.privacy: give noise_multiplier or "),
        ({"local.privacy": {"noise_multiplier": 1}}, "local.privacy.delta: needed for a guarantee, such as 1e-5"),
        ({"local.privacy": {"noise": 1}}, "local.privacy.noise: no such key; known: accountant, delta"),
        ({"local.privacy": 1.1}, "local.privacy=1.1: expected a mapping; it has keys such as local.privacy.noise_mul"),
        (
            {"local.privacy.delta": 0.2},
            "local.privacy.delta=0.2: must be less than one over the records of every client, ",
        ),
        (
            {"local.privacy": {"target_epsilon": 1e-6, "delta": 1e-9}},
            "local.privacy.target_epsilon=1e-06: no amount of noise keeps 12 steps below ε=",
        ),
        ({"evaluate.points": ["adapted"]}, "evaluate.points=[adapted]: trains beyond the steps that local.privacy.*"),
        ({"unseen_clients": 1}, "unseen_clients=1: train after the steps that local.privacy.* counts"),
        ({"local.precision": "bf16"}, "local.precision=bf16: would round what local.privacy.* clips; use float32"),
        (
            {"sampling.name": "power_of_choice", "cohort": 1},
            "sampling.name=power_of_choice: uses what clients report, which local.privacy.* does not protect",
        ),
        (
            {"schedule": {"name": "buffered", "concurrency": 2, "buffer": 1}, "clock.step_seconds": 1},
            "schedule.name=buffered: local.privacy.* counts the steps of rounds that wait",
        ),
        (
            {"attack": {"name": "label_flip", "share": 0.5}},
            "attack.name=label_flip: trains on false data, of which local.privacy.* knows nothing",
        ),
        ({"augment.name": f"{__name__}:Mixing"}, f"augment.name={__name__}:Mixing: may mix the records of a batch"),
        (
            {"data": {"name": "heart_disease"}, "model.name": "mlp"},
            "data.standardize=hospital: takes means of training records, which local.privacy.* does not protect",
        ),
        (
            {"model": {"name": "digits_cnn", "width": 0.125}},
            "local.privacy: batch norm mixes the records of a batch, whose gradients could not be told apart; use ",
        ),
        (
            {"loss": {"name": "cross_entropy", "weight": [1, 2, 1, 1, 1, 1, 5, 1, 1, 1]}},
            "local.privacy: the loss of a ",
        ),
        ({"algorithm.name": "mixup"}, "local.privacy: algorithm.name=mixup changes the records of a batch together"),
        ({"algorithm.name": "fedrod"}, "local.privacy: algorithm.name=fedrod reads its clients' data outside of the "),
        ({"algorithm.name": "fedfomo"}, "local.privacy: algorithm.name=fedfomo reads its clients' data outside of"),
        ({"algorithm.name": "fedproto"}, "local.privacy: algorithm.name=fedproto computes with the labels of a batch"),
        ({"algorithm.name": "fedreg"}, "local.privacy: algorithm.name=fedreg computes with the inputs of a batch"),
        ({"algorithm.name": "pfedme"}, "local.privacy: algorithm.name=pfedme takes several gradients of one batch"),
        ({"algorithm.name": "irm"}, "local.privacy: algorithm.name=irm computes with all records of a batch together"),
    ],
)
def test_what_is_refused(given, message):
    groups = {key.partition(".")[0] for key in given}
    base = {key: value for key, value in SMALL.items() if key not in groups}
    noise = {} if "local.privacy" in given else NOISE
    with pytest.raises(UsageError) as error:
        make_plan(Config.read(base, {"local.batch_size": 5}, noise, given))
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


class Mixing(Augment):
    def __call__(self, x):
        return x + x.mean(0)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in ("flora", "het_lora")])
def test_which_methods_take_it(name):
    given = {"algorithm.name": name}
    if name in ("fedbn", "dp_fedbn", "gaussian_dp_fedbn"):
        given["model"] = {"name": "digits_cnn", "width": 0.125}
    if name in TAKES:
        assert plan_of(given).blueprint.algorithm.privacy.max_grad_norm == 1.0
    else:
        message = refusal(given)
        assert "local.privacy" in message


class Leaking(FedAvg):
    """FedAvg whose clients also send the mean of their labels."""

    def finish(self, ctx, work, client, down, data):
        kept, up = super().finish(ctx, work, client, down, data)
        mean = torch.cat([batch.y.float() for batch in data.train.batches(64)]).mean()
        return kept, up | {"mean": mean}


class Peeking(FedAvg):
    """FedAvg whose learning rate depends on the batch."""

    def step(self, ctx, work, down, batch):
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"largest": batch.x.max()}, metrics


class Joining(FedAvg):
    """FedAvg whose clients keep their first record."""

    def join(self, ctx):
        return super().join(ctx) | {"first": next(iter(ctx.data.train.batches(1))).x}


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ("Leaking", "reads its clients' data outside of the gradient that has noise"),
        ("Peeking", "computes with the inputs of a batch outside of the gradient that has noise"),
        ("Joining", "reads its clients' data outside of the gradient that has noise"),
    ],
)
def test_methods_of_ones_own_may_not_look_at_records(method, what):
    message = refusal({"algorithm.name": f"{__name__}:{method}"})
    assert what in message
    assert message.endswith("which ε would not count; use a method such as fedavg, fedprox, scaffold, fedper or ditto")


class Own(nn.Module):
    """A model of one's own; `kind` is what it does beside."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.kind = kind
        self.first, self.drop, self.last = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.kind == "centred":
            x = x - x.mean(0)
        if self.kind == "counts" and self.training:
            self.seen = self.seen + x.mean()
        if self.kind == "branches" and float(x.sum()) > 0:
            x = -x
        x = torch.relu(self.first(x))
        if self.kind == "drops":
            x = F.dropout(x, 0.5, self.training)
        return self.last(self.drop(x))


def own(kind, **others):
    given = {"local.privacy.noise_multiplier": 1, "local.privacy.delta": 1e-3, "local.batch_size": 5, "rounds": 2}
    return make_plan(Config.read(given), Given(clients=as_mappings(blobs()), model=Own(kind), **others))


def test_models_of_ones_own_with_dropout_layers_are_taken():
    assert private_training_of(own("plain").blueprint.algorithm) is not None


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("centred", "local.privacy: the loss of a batch is not the mean of the losses of its records with this model"),
        ("counts", "local.privacy: the loss of a batch is not the mean of the losses of its records with this model"),
        ("drops", "local.privacy: the loss of a batch is not the mean of the losses of its records with this model"),
        ("branches", "local.privacy: no gradient of a single record: "),
    ],
)
def test_models_of_ones_own_that_have_no_gradient_of_a_record_are_refused(kind, message):
    with pytest.raises(UsageError) as error:
        own(kind)
    assert str(error.value).startswith(message)


def test_a_loss_of_ones_own_that_compares_records_is_refused():
    def spread(outputs, y):
        return F.cross_entropy(outputs, y) + outputs.var(0, unbiased=False).sum()

    with pytest.raises(UsageError, match=r"local\.privacy: the loss of a batch is not the mean of the losses"):
        own("plain", loss=spread)


def test_batch_norm_that_is_frozen_is_taken():
    plan = plan_of({"model": {"name": "digits_cnn", "width": 0.125}, "batch_norm": "frozen"})
    assert private_training_of(plan.blueprint.algorithm) is not None


# What the plan says


def test_the_plan_has_the_epsilon_of_each_client_after_all_rounds():
    given = {"local.privacy.noise_multiplier": 1.2, "local.privacy.delta": 1e-3, "local.batch_size": 5, "rounds": 7}
    plan = make_plan(Config.read(given), Given(clients=as_mappings(blobs(4)), model=nn.Linear(6, 3)))
    expected = []
    for size in (20, 26, 33, 41):
        accountant = RDPAccountant()
        accountant.history = [(1.2, 5 / size, 7 * (size // 5))]
        expected.append(accountant.get_epsilon(1e-3))
    first, public, simulation = record_privacy_notes(plan.blueprint, plan.population)
    assert first == (
        f"local.privacy: ε of each client after 7 rounds: {min(expected):.3g} to {max(expected):.3g} at δ=0.001 by "
        "rdp, if it takes part in all of them; σ=1.2, C=1; neighbours: add or remove a record"
    )
    assert "numbers of records are taken as public" in public
    assert "it protects nobody" in simulation
    assert first in run_summary(plan)


def test_a_target_gives_the_least_noise_with_which_no_client_spends_more():
    given = {"local.privacy.target_epsilon": 3, "local.privacy.delta": 1e-3, "local.batch_size": 5, "rounds": 7}
    plan = make_plan(Config.read(given), Given(clients=as_mappings(blobs(4)), model=nn.Linear(6, 3)))
    sigma = private_training_of(plan.blueprint.algorithm).sigma
    spent = []
    for size in (20, 26, 33, 41):
        accountant = RDPAccountant()
        accountant.history = [(sigma, 5 / size, 7 * (size // 5))]
        spent.append(accountant.get_epsilon(1e-3))
    assert max(spent) == pytest.approx(3, rel=5e-3)
    assert max(spent) <= 3.001
    longer = make_plan(Config.read(given | {"rounds": 8}), Given(clients=as_mappings(blobs(4)), model=nn.Linear(6, 3)))
    assert longer.trial != plan.trial  # its noise is another one


def test_without_the_section_a_trial_has_its_old_name_and_values():
    config = Config.read(SMALL)
    assert "privacy" not in config.tree()["local"]
    assert Config.read(SMALL, {"local.privacy": None}).tree() == config.tree()


# Whole runs


def epsilons(result):
    rows = result.metrics[result.metrics["metric"] == "record_epsilon"]
    return {(row.round, row.client): row.value for row in rows.itertuples()}


def test_both_kinds_of_privacy_go_together_and_have_names_of_their_own(here):
    both = {"privacy.sigma": 1, "privacy.delta": 0.01, "algorithm.weighting": "equal", "partition.name": "iid"}
    result = rayfed.run(SMALL | NOISE | both | {"partition.clients": 8}, quiet=True)
    of_records = result.metrics[result.metrics["metric"] == "record_epsilon"]
    assert len(of_records) == 3 * 8
    rounds = result.rounds
    assert set(rounds["privacy_unit"].dropna()) == {"client"}
    assert rounds["epsilon"].dropna().iloc[-1] != pytest.approx(of_records["value"].max())


def test_a_trial_that_is_resumed_ends_with_the_same_weights_and_epsilon(here):
    config = SMALL | NOISE
    whole = rayfed.run(config | {"experiment": "whole"}, quiet=True)
    rayfed.run(config | {"experiment": "parts", "rounds": 1}, quiet=True)
    resumed = rayfed.run(config | {"experiment": "parts", "resume": True}, quiet=True)
    assert resumed.weights_hash == whole.weights_hash
    assert epsilons(resumed) == epsilons(whole)
    assert len(epsilons(whole)) == 3 * 2


@pytest.mark.ray
@pytest.mark.parametrize("width", [1, 2])
def test_hosts_give_the_same_bits(here, width):
    config = SMALL | NOISE | {"placement.vmap_clients": width}
    alone = rayfed.run(config | {"experiment": "alone"}, quiet=True)
    hosts = rayfed.run(config | {"experiment": "hosts", "placement.hosts": 2}, quiet=True)
    assert hosts.weights_hash == alone.weights_hash
