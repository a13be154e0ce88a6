"""Drift, gradient norms and cost, by hand, by autograd and by the rows of papers' tables."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers.federations import blobs, blueprint, net
from rayfed.algorithms.fedavg import FedAvg
from rayfed.engine.device_data import Normalise, Part
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan import make_plan
from rayfed.experiments.run_summary import run_summary
from rayfed.metrics.cost import cost
from rayfed.metrics.heterogeneity import Drift, GradientNorm, full_gradient
from rayfed.models.base import build_model


def test_drift():
    before, after = (
        {"a": torch.tensor([3.0, 0]), "b": torch.tensor(4.0)},
        {"a": torch.tensor([3.0, 2]), "b": torch.tensor(5.5)},
    )
    assert dict(Drift().measure(before, after)) == pytest.approx({"drift": 2.5, "drift_relative": 0.5})


def test_cost_of_a_small_network():
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(3 * 4 * 5, 7))
    found = cost(model, (2, 4, 5))
    assert found.parameters == 3 * 2 * 9 + 3 + 60 * 7 + 7
    assert found.macs == 4 * 5 * 3 * 2 * 9 + 60 * 7
    assert model.training


class Sequence(nn.Module):
    """A layer over a sequence [steps, width], then ten classes."""

    def __init__(self, layer, width):
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, 10)

    def forward(self, x):
        found = self.layer(x)
        return self.head((found[0] if isinstance(found, tuple) else found)[:, -1])


def one_encoder_layer(steps=16, width=64, hidden=128):
    """Queries, keys and values, their two products, the way out, and two linear layers."""
    attention = steps * 3 * width**2 + 2 * steps**2 * width + steps * width**2
    return attention + 2 * steps * width * hidden


@pytest.mark.parametrize(
    ("layer", "shape", "width", "macs"),
    [
        (lambda: nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), (16, 64), 64, one_encoder_layer()),
        (lambda: nn.LSTM(32, 64, batch_first=True), (16, 32), 64, 16 * 4 * 64 * (32 + 64)),
        (lambda: nn.GRU(32, 64, batch_first=True), (16, 32), 64, 16 * 3 * 64 * (32 + 64)),
        (
            lambda: nn.LSTM(32, 64, num_layers=2, bidirectional=True, batch_first=True),
            (16, 32),
            128,
            2 * 16 * 4 * 64 * ((32 + 64) + (128 + 64)),
        ),
    ],
)
def test_attention_and_recurrence_cost_their_products(layer, shape, width, macs):
    def switches():
        return torch.backends.mha.get_fastpath_enabled(), torch.backends.mkldnn.enabled, torch.backends.cudnn.enabled

    before = switches()
    assert cost(Sequence(layer(), width), shape).macs == macs + width * 10
    assert switches() == before


def test_cost_stands_in_the_table_of_trials_and_in_the_introduction(tmp_path):
    """A model of tokens needs whole numbers; looking vectors up multiplies nothing."""
    x, y = np.arange(40).reshape(8, 5) % 7, np.arange(8) % 3
    config = Config.read({"rounds": 1, "local.batch_size": 4, "results": str(tmp_path)})
    plan = make_plan(
        config,
        Given(
            clients=[{"train": (x, y), "test": (x, y)}] * 2,
            model=lambda: nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)),
        ),
    )
    assert (plan.values()["parameters"], plan.values()["macs"]) == (7 * 4 + 4 * 3 + 3, 4 * 3)
    assert "43 parameters, 12 multiply-accumulates per example\n" in run_summary(plan)


@pytest.mark.parametrize(
    ("name", "options", "shape", "classes", "parameters", "macs"),
    [
        ("resnet18", {}, (3, 224, 224), 7, 11.18e6, 1.84e9),
        (
            "digits_cnn",
            {"pool": 3},
            (3, 32, 32),
            10,
            18.15e6,
            0.062e9,
        ),  # the paper prints 0.08e9; by hand it is 0.062e9
    ],
)
def test_rows_of_fraugs_table_4(name, options, shape, classes, parameters, macs):
    found = cost(build_model(name, options, shape, classes, torch.float32), shape)
    assert found.parameters == pytest.approx(parameters, rel=1e-3)
    assert found.macs == pytest.approx(macs, rel=0.02)


@pytest.mark.parametrize("size", [4, 500])
def test_gradient_is_that_of_all_examples_at_once(size):
    people, model = blobs(), net()
    task = blueprint(FedAvg(), people, model=model).context(people, "cpu").task
    weights = task.initial_weights()
    weights["body.1.running_mean"] = torch.linspace(-1, 1, 12)  # evaluation mode uses it
    model.load_state_dict(weights)
    model.eval()
    normalise = Normalise(people, torch.device("cpu"), channels_last=False)
    part = Part(people.clients[0].val, torch.device("cpu"), normalise)
    F.cross_entropy(model(part.x), part.y).backward()
    found = full_gradient(task, weights, part, size)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)


def measured(norms):
    gradients = {f"d{i}": ({"w": torch.tensor([norm, 0.0])}, 3) for i, norm in enumerate(norms)}
    return {(domain, value.metric): value for domain, value in GradientNorm().measure(gradients)}


@pytest.mark.parametrize(
    ("norms", "mean", "std"),
    [
        ((0.940, 0.233, 0.120, 0.149, 0.532, 1.485), 0.577, 0.542),
        ((0.114, 0.081, 0.088, 0.066, 0.090, 0.129), 0.095, 0.023),
    ],
)
def test_rows_of_table_7(norms, mean, std):
    """Its mean and deviation follow from its norms, that of the angle held out among them."""
    found = measured(norms)
    assert found["", "gradient_norm_mean"].value == pytest.approx(mean, abs=6e-4)
    assert found["", "gradient_norm_std"].value == pytest.approx(std, abs=6e-4)
    assert found["d2", "gradient_norm"].value == pytest.approx(norms[2])


def test_mean_square_and_one_domain():
    found = measured((2.0, 4.0, 6.0))
    assert found["", "gradient_norm_mean_square"].value == pytest.approx(56 / 3)
    assert found["", "gradient_norm_std"].value == pytest.approx(2.0)  # with n − 1
    assert found["", "gradient_norm_mean"].n == 9
    assert ("", "gradient_norm_std") not in measured((2.0,))
