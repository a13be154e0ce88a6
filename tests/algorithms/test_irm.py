"""IRM's penalty against its closed form and a number worked out by hand; Fed-IRM by hand."""

import pytest
import torch

from helpers.federations import blobs, blueprint
from rayfed.algorithms.common.invariance import penalised_loss, slope
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import vectorised
from rayfed.core.task import Output


def task():
    return blueprint(FedAvg(), blobs()).context(blobs(), "cpu").task


def closed(logits, y):
    """Mean of ⟨softmax(o), o⟩ − o_y."""
    return ((logits.softmax(1) * logits).sum(1) - logits.gather(1, y[:, None])[:, 0]).mean()


def test_numbers():
    found = slope(task(), torch.tensor([[2.0, 0.0, -1.0]]), torch.tensor([0]))
    assert found.item() == pytest.approx(-0.35442, abs=1e-5)
    output = Output(torch.tensor([[2.0, 0.0, -1.0]]), torch.zeros(1, 8), {})
    for beta, expected in ((4.0, (0.5 + 4 * 0.12561) / 4), (0.5, 0.5 + 0.5 * 0.12561)):
        value = penalised_loss(task(), "scale", beta, torch.tensor(0.5), {}, output, torch.tensor([0]))
        assert value.item() == pytest.approx(expected, abs=1e-5)


def test_slope_is_its_closed_form_looped_and_vmapped_and_so_is_its_gradient():
    torch.manual_seed(0)
    logits, y = torch.randn(2, 5, 3, requires_grad=True), torch.randint(3, (2, 5))
    wanted = torch.stack([closed(some, labels).square() for some, labels in zip(logits, y, strict=True)])
    (gradient,) = torch.autograd.grad(wanted.sum(), logits)
    own = task()
    looped = torch.stack([slope(own, some, labels).square() for some, labels in zip(logits, y, strict=True)])
    torch.testing.assert_close(looped, wanted)
    torch.testing.assert_close(torch.autograd.grad(looped.sum(), logits)[0], gradient)
    with vectorised():
        grads = torch.vmap(torch.func.grad(lambda some, labels: slope(own, some, labels).square()))(logits.detach(), y)
    torch.testing.assert_close(grads, gradient)
