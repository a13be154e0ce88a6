"""Gradient-norm heterogeneity against autograd on all examples at once, and against the rows of the paper's table."""

import pytest
import torch
import torch.nn.functional as F

from helpers.federations import blobs, blueprint, net
from rayfed.algorithms.fedavg import FedAvg
from rayfed.engine.device_data import Normalise, Part
from rayfed.metrics.heterogeneity import GradientNorm, full_gradient


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
