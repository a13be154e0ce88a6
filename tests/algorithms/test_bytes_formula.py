"""Bytes by papers' formulas: by hand, against the paper's worked example, and never inherited."""

from dataclasses import dataclass

import pytest
from torch import nn

from helpers.federations import blobs, blueprint, net, simulate
from rayfed.algorithm import Context, Phase
from rayfed.algorithms.adcol import Adcol
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedbn import FedBN
from rayfed.algorithms.fedprox import FedProx
from rayfed.algorithms.moon import Moon
from rayfed.core.optim import SGD
from rayfed.core.task import Task
from rayfed.engine.server import bytes_by_formula
from rayfed.models.split_model import ensure_split


def paper_context(algorithm, parties=100):
    """A network with representations of 128 numbers, as in the worked example of ADCOL's paper."""
    layers = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 128), nn.ReLU(), nn.Linear(128, 10))
    model = ensure_split(nn.Sequential(*layers), (784,))
    task = Task(model, nn.functional.cross_entropy, num_clients=parties, num_classes=10)
    return Context(task.with_modules(algorithm.modules(task)), SGD(lr=0.1), 10, Phase("train", epochs=1), 1)


def test_fedavg_with_the_papers_mlp():
    """ADCOL's paper: 199,210 parameters and 100 parties are 159.4 MB."""
    layers = (nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Linear(200, 10))
    task = Task(ensure_split(nn.Sequential(*layers), (784,)), None, num_clients=100, num_classes=10)
    ctx = Context(task, SGD(lr=0.1), 10, Phase("train", epochs=1), 1)
    assert bytes_by_formula(FedAvg(), ctx, [600] * 100) == 2 * 100 * 4 * 199_210 == 159_368_000


def test_adcol_with_the_papers_sizes():
    """60,000 examples, d = 128, and a discriminator 128-128-N; the paper prints 37.6 MB, with 5 outputs for 100."""
    for parties, outputs in ((100, 100), (5, 5)):
        algorithm = Adcol(hidden=[128])
        found = bytes_by_formula(algorithm, paper_context(algorithm, parties), [60_000 // parties] * parties)
        discriminator = 4 * (128 * 128 + 128 + 128 * outputs + outputs)
        assert found == 4 * 60_000 * 128 + parties * discriminator
    assert 4 * 60_000 * 128 + 100 * discriminator == pytest.approx(37.6e6, abs=0.05e6)
    quarter = Adcol(hidden=[128], sampling=0.25)
    assert bytes_by_formula(quarter, paper_context(quarter, 2), [30, 50]) == 80 * 128 + 2 * 4 * (128 * 129 + 129 * 2)
    for variant in (Adcol(fixed_size=True), Adcol(share_predictor=True)):
        assert bytes_by_formula(variant, paper_context(variant, 2), [30, 50]) is None


def test_counted_bytes_are_those_of_the_formula_and_the_running_statistics():
    """The formula leaves out what batch norm counts and averages; with FedBN no part of it travels."""
    people = blobs(4)
    statistics = sum(buffer.numel() * buffer.element_size() for buffer in net().buffers())
    for algorithm, extra in ((FedAvg(), statistics), (FedProx(), statistics), (Moon(), statistics), (FedBN(), 0)):
        _, records = simulate(blueprint(algorithm, people, cohort=3), people)
        for record in records:
            counted = sum(record.bytes_down.values()) + sum(record.bytes_up.values())
            assert counted == record.bytes_formula + 2 * 3 * extra
    _, (record, _) = simulate(blueprint(Adcol(), people), people)
    assert sum(record.bytes_down.values()) + sum(record.bytes_up.values()) == record.bytes_formula


def test_nobody_inherits_a_formula():
    @dataclass(frozen=True, kw_only=True)
    class Mine(FedAvg):
        pass

    assert bytes_by_formula(Mine(), paper_context(Mine()), [1]) is None
