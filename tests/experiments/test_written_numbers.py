"""Numbers as YAML and command lines write them: 5e-1 for a user's own code, and what no float32 or int64 holds."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import arguments_for
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.sources import from_arguments
from rayfed.losses.base import build_loss

SMALL = {
    "data.domains": ["font", "plain"],
    "data.per_domain": 16,
    "model.name": "mlp",
    "model.hidden": [4],
    "rounds": 1,
}


def plan(*pairs):
    return make_plan(Config.read({**SMALL, "model.hidden": None} | SMALL, from_arguments(pairs)))


def own_plan(*pairs):
    """A plan without rayfed's model, of which the options would be left over."""
    values = {key: value for key, value in SMALL.items() if not key.startswith("model")}
    return make_plan(Config.read(values, from_arguments(pairs)))


def net(shape, num_classes, dropout=0.5, width: int = 8, sizes=(), label: str = "", more=None):
    net.given = {"dropout": dropout, "width": width, "sizes": sizes, "label": label, "more": more}
    inner = nn.Linear(int(np.prod(shape)), width)
    return nn.Sequential(nn.Flatten(), nn.Dropout(dropout), inner, nn.Linear(width, num_classes))


class Net(nn.Sequential):
    def __init__(self, shape, num_classes, *, dropout):
        super().__init__(nn.Flatten(), nn.Dropout(dropout), nn.Linear(int(np.prod(shape)), num_classes))


def scaled(outputs, labels, *, gamma=2.0):
    return F.cross_entropy(outputs, labels) * gamma


class Scaled(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        self.gamma = gamma + 0.0

    def forward(self, outputs, labels):
        return F.cross_entropy(outputs, labels) * self.gamma


@dataclass(frozen=True, kw_only=True)
class Tuned(FedAvg):
    gamma: Any = 1.0
    rate: float = 0.5
    steps: int = 1


HERE = f"{__name__}:"


class TestOwnCode:
    def test_a_function_of_a_model(self):
        own_plan(f"model.name={HERE}net", "model.dropout=5e-1", "model.width=1e1", "model.sizes=[1e-2, 3, 4e0]")
        assert net.given["dropout"] == 0.5
        assert (net.given["width"], type(net.given["width"])) == (10, int)
        assert net.given["sizes"] == [0.01, 3, 4.0]

    def test_words_stay_words(self):
        own_plan(f"model.name={HERE}net", "model.label=7e3", "model.more={a: 2e-1, b: seven, c: 1e}")
        assert net.given["label"] == "7e3"
        assert net.given["more"] == {"a": 0.2, "b": "seven", "c": "1e"}

    def test_a_class_of_a_model(self):
        blueprint = own_plan(f"model.name={HERE}Net", "model.dropout=2.5e-1").blueprint
        assert [layer.p for layer in blueprint.model.modules() if isinstance(layer, nn.Dropout)] == [0.25]

    @pytest.mark.parametrize("name", ["scaled", "Scaled"])
    def test_losses(self, name):
        outputs, y = torch.tensor([[0.0, 1.0], [2.0, 0.0]]), torch.tensor([0, 1])
        expected = 0.5 * F.cross_entropy(outputs, y)
        torch.testing.assert_close(build_loss(f"{HERE}{name}", {"gamma": "5e-1"})(outputs, y), expected)

    def test_algorithms(self):
        algorithm = plan(
            f"algorithm.name={HERE}Tuned", "algorithm.gamma=5e-1", "algorithm.rate=2e-1", "algorithm.steps=1e1"
        ).config.algorithm
        assert (algorithm.gamma, algorithm.rate, algorithm.steps) == (0.5, 0.2, 10)

    def test_metrics_of_torchmetrics(self):
        key = "metrics.torchmetrics:classification.MulticlassFBetaScore"
        (metric,) = plan(f"{key}={{beta: 5e-1, num_classes: 1e1}}").config.metrics.values()
        assert metric.made().beta == 0.5

    def test_a_class_without_a_signature(self):
        assert arguments_for(dict, {"a": "1e1", "b": "x"}) == {"a": 10.0, "b": "x"}


def broken(shape, num_classes):
    raise KeyError("weights")


class Broken(nn.Module):
    def __init__(self, gamma):
        super().__init__()
        raise ZeroDivisionError("of mine")


class TestErrors:
    def test_of_a_model(self):
        words = rf"model.name={HERE}broken: cannot be made: KeyError: 'weights' \(.*written_numbers.py, line \d+, in br"
        with pytest.raises(UsageError, match=words):
            own_plan(f"model.name={HERE}broken")

    def test_of_a_network_that_is_too_large(self):
        with pytest.raises(UsageError, match=r"model.name=mlp: cannot be made: RuntimeError: .*memory"):
            plan("model.hidden=[10000000000000]")

    def test_of_a_loss(self):
        words = rf"loss.name={HERE}Broken: cannot be made: ZeroDivisionError: of mine \(.*, in __init__\)"
        with pytest.raises(UsageError, match=words):
            build_loss(f"{HERE}Broken", {"gamma": 1})


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("local.lr=1e-320", "local.lr=1e-320: is too small for float32, of which the numbers are 1.2e-38 to 3.4e+38"),
        ("local.lr=1e39", "local.lr=1e+39: is too large for float32"),
        ("placement.gpus=1e-320", "placement.gpus=1e-320: is too small for float32"),
        (
            "local.epochs=1e30",
            "local.epochs: is an integer of 31 digits; must be below 2^63",
        ),
        ("model.projection=99999999999999999999999", "model.projection: is an integer of 23 digits"),
        ("partition.clients=1e9", "partition.clients=1000000000: must be at most 1000000"),
        ("local.lr=1e400", "local.lr=inf: must be a finite number"),
    ],
)
def test_numbers_that_no_model_holds(pair, words):
    with pytest.raises(UsageError) as caught:
        Config.read(SMALL | {"partition.name": "iid"}, from_arguments([pair]))
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("lr", [2e-38, 1e-9, 3e38])
def test_numbers_of_float32_pass(lr):
    assert Config.read({"local.lr": lr}).local.lr == lr
