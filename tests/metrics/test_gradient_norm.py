"""Gradient-norm heterogeneity against autograd on all examples at once, and against the closed form of quadratics."""

import pytest
import torch
import torch.nn.functional as F
from support import Point, blobs, blueprint, net, quadratic, quadratics

from rayfed.algorithms.fedavg import FedAvg
from rayfed.engine.resident import Normalise, Part
from rayfed.metrics.gradient_norm import full_gradient, gradient_norm, heterogeneity


def parts_of(people):
    normalise = Normalise(people, torch.device("cpu"), channels_last=False)
    return [Part(client.val, torch.device("cpu"), normalise) for client in people.clients]


@pytest.mark.parametrize("size", [4, 500])
def test_gradient_is_that_of_all_examples_at_once(size):
    people, model = blobs(), net()
    task = blueprint(FedAvg(), people, model=model).context(people, "cpu").task
    weights = task.initial_weights()
    weights["body.1.running_mean"] = torch.linspace(-1, 1, 12)  # evaluation mode uses it
    model.load_state_dict(weights)
    model.eval()
    parts = parts_of(people)[:2]
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
    F.cross_entropy(model(x), y).backward()
    found = full_gradient(task, weights, parts, size)
    assert set(found) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    norm = sum((p.grad.double() ** 2).sum() for p in model.parameters()) ** 0.5
    assert gradient_norm(task, weights, parts) == pytest.approx(norm.item(), rel=1e-5)


def test_quadratics():
    people = quadratics((1.0, 3.0), (2.0, 3.0), (4.0, -0.5))
    task = blueprint(FedAvg(), people, model=Point(), loss=quadratic).context(people, "cpu").task
    normalise = Normalise(people, torch.device("cpu"), channels_last=False)
    domains = {f"d{i}": [Part(c.test, torch.device("cpu"), normalise)] for i, c in enumerate(people.clients)}
    found = heterogeneity(task, {"w": torch.tensor([1.0])}, domains)
    assert found.norms == {"d0": 2.0, "d1": 4.0, "d2": 6.0}  # h (w − a)
    assert found.mean == pytest.approx(4.0)
    assert found.std == pytest.approx(2.0)  # with n − 1
    assert found.mean_square == pytest.approx(56 / 3)
    pooled = [part for parts in list(domains.values())[:2] for part in parts]
    assert gradient_norm(task, {"w": torch.tensor([1.0])}, pooled) == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("norms", "mean", "std"),
    [
        ((0.940, 0.233, 0.120, 0.149, 0.532, 1.485), 0.577, 0.542),
        ((0.114, 0.081, 0.088, 0.066, 0.090, 0.129), 0.095, 0.023),
    ],
)
def test_rows_of_table_7(norms, mean, std):
    """Its mean and deviation follow from its norms, that of the angle held out among them."""
    people = quadratics(*((1.0, -norm) for norm in norms))
    task = blueprint(FedAvg(), people, model=Point(), loss=quadratic).context(people, "cpu").task
    normalise = Normalise(people, torch.device("cpu"), channels_last=False)
    domains = {f"d{i}": [Part(c.test, torch.device("cpu"), normalise)] for i, c in enumerate(people.clients)}
    found = heterogeneity(task, {"w": torch.tensor([0.0])}, domains)
    assert found.mean == pytest.approx(mean, abs=6e-4)
    assert found.std == pytest.approx(std, abs=6e-4)


def test_nothing_to_score():
    people = blobs()
    task = blueprint(FedAvg(), people).context(people, "cpu").task
    with pytest.raises(ValueError, match="no examples"):
        gradient_norm(task, task.initial_weights(), [])
