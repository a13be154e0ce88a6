"""Heterogeneity of clients: the norm of domains' gradients, and the drift of local training.

Gradient norms: de Luca et al. 2022, "Mitigating Data Heterogeneity in Federated Learning with Data Augmentation", Eq. 5
and Tables 7 to 9.

    g_d = ‖∇_θ f_d(θ)‖₂,  f_d the mean loss over domain d, θ the global model

f_d is over the validation examples of a training domain, or over all examples of the held-out domain. The tables report
each g_d, their mean and their standard deviation (divided by n − 1), the held-out domain included. Eq. 5 is the mean
of g_d². Networks run in evaluation mode.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from rayfed.core.network import gradients
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, add, norm, only, scale
from rayfed.metrics.base import OfGradients, OfTraining, Value


class GradientNorm(OfGradients):
    """`gradient_norm` of every domain, and `gradient_norm_mean`, `_std` and `_mean_square` (Eq. 5) over the domains."""

    higher_is_better = False  # norms are neither good nor bad, but smaller where domains are alike

    def measure(self, gradients: Mapping[str, tuple[Mapping[str, Tensor], int]]) -> Iterable[tuple[str, Value]]:
        norms = []
        total = 0
        for domain, (gradient, n) in gradients.items():
            norm = _norm(gradient)
            yield domain, Value("gradient_norm", norm, n)
            norms.append(norm)
            total += n
        values = torch.tensor(norms, dtype=torch.float64)
        if len(values):
            yield "", Value("gradient_norm_mean", float(values.mean()), total)
            yield "", Value("gradient_norm_mean_square", float(values.square().mean()), total)
        if len(values) > 1:
            yield "", Value("gradient_norm_std", float(values.std()), total)


def full_gradient(task: Task, weights: Weights, part: Any, size: int = 500) -> Weights:
    """Return ∇_θ of the mean loss over all examples of `part` (not empty; it has `len()` and `batches(size)`)."""
    total: Weights = {}
    for batch in part.batches(size):
        share = len(batch.y) / len(part)
        of_batch = scale(_gradient(task, weights, batch), share)
        if total:
            total = add(total, of_batch)
        else:
            total = of_batch
    return total


def _gradient(task: Task, weights: Weights, batch: Batch) -> Weights:
    def loss(trained: Weights) -> tuple[Tensor, Weights]:
        whole = weights | trained
        logits = task.forward(whole, batch.x, train=False).logits
        return task.scoring_loss(logits, batch.y, whole), {}

    grads, _, _ = gradients(loss, only(weights, task.trainable))
    return grads


class Drift(OfTraining):
    """`drift`: ‖w_i − w‖₂ over all parameters; `drift_relative`: the same, divided by ‖w‖₂.

    w is the model that client i downloaded, and w_i is its model after local training.
    """

    higher_is_better = False  # drift is neither good nor bad, but smaller where clients are alike

    def measure(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterable[tuple[str, float]]:
        changes = {name: after[name].double() - value.double() for name, value in before.items()}
        distance = _norm(changes)
        yield "drift", distance
        norm = _norm(before)
        if norm:
            yield "drift_relative", distance / norm


def _norm(weights: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all entries, computed in float64."""
    return float(norm({name: value.double() for name, value in weights.items()}))
