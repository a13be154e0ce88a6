"""How many gradients a plan takes: a run with a large model should begin soon."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F

from rayfed.experiments import plan
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def counted(monkeypatch):
    """Count gradients; those of the proof apart."""
    counts = Counter()
    place = ["plan"]

    def counting(original):
        def count(*args, **kwargs):
            counts[place[0]] += 1
            return original(*args, **kwargs)

        return count

    def proved(*args):
        place[0] = "proof"
        try:
            return prove_training(*args)
        finally:
            place[0] = "plan"

    prove_training = plan.prove_training
    monkeypatch.setattr(plan, "prove_training", proved)
    for name in ("grad", "backward"):
        monkeypatch.setattr(torch.autograd, name, counting(getattr(torch.autograd, name)))
    return counts


def own_model():
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784 * 3, 10))


def own_loss(outputs, y):
    return F.cross_entropy(outputs, y)


@pytest.mark.parametrize(
    ("values", "given", "most"),
    [
        ({}, {}, 1),  # which weights belong to the head
        ({"placement.vmap_clients": "auto"}, {}, 1),
        ({"algorithm.name": "mixup"}, {}, 1),
        ({}, {"model": own_model}, 0),
        ({}, {"loss": own_loss}, 2),  # what its outputs stand for, too
    ],
)
def test_a_plan_and_its_summary_take_few_gradients(counted, values, given, most):
    run_summary(make_plan(Config.read(values), Given(**given)))
    assert counted["plan"] == most
    proof = 0
    if given:
        proof = 6 + most // 2  # two steps of torch, four of the engine, and the head of the model in float64
    assert counted["proof"] == proof
