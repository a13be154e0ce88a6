"""Heterogeneity as the norm of domains' gradients: de Luca et al. 2022, "Mitigating Data Heterogeneity in Federated
Learning with Data Augmentation", Eq. 5 and Tables 7 to 9.

    g_d = ‖∇_θ f_d(θ)‖₂,  f_d the mean loss over domain d, θ the final global model

over the validation examples of the training domains, and all examples of the one held out. Table 7 has the mean of all
g_d, that of the domain held out among them, and their standard deviation (with n − 1); Eq. 5 has the mean of g_d².
Networks run in evaluation mode.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.network import gradients
from rayfed.task import Batch, Task
from rayfed.tree import Weights, add, only, scale


class Heterogeneity(NamedTuple):
    """Every domain's g_d, their mean, their standard deviation (n − 1; 0 of one domain), and the mean of g_d²."""

    norms: dict[str, float]
    mean: float
    std: float
    mean_square: float


def full_gradient(task: Task, weights: Weights, parts: Sequence[Any], size: int = 500) -> Weights:
    """∇_θ of the mean loss over all examples of `parts` (anything with `len()` and `batches(size)`) together."""
    count = sum(len(part) for part in parts)
    total: Weights | None = None
    for batch in (batch for part in parts for batch in part.batches(size)):
        grads = scale(_gradient(task, weights, batch), len(batch.y) / count)
        total = grads if total is None else add(total, grads)
    if total is None:
        raise ValueError("no examples to take a gradient over")
    return total


def _gradient(task: Task, weights: Weights, batch: Batch) -> Weights:
    def loss(trained: Weights) -> tuple[Tensor, Weights]:
        return task.loss(task.model(weights | trained, batch.x, train=False)[0], batch.y), {}

    return gradients(loss, only(weights, task.trainable))[0]


def gradient_norm(task: Task, weights: Weights, parts: Sequence[Any]) -> float:
    """g_d of the domain whose examples are those of `parts` (of all its clients)."""
    squares = [grad.double().square().sum() for grad in full_gradient(task, weights, parts).values()]
    return float(torch.stack(squares).sum().sqrt())


def heterogeneity(task: Task, weights: Weights, domains: Mapping[str, Iterable[Any]]) -> Heterogeneity:
    """The gradient norms of `weights` in every domain: its name, and its clients' parts."""
    norms = {name: gradient_norm(task, weights, list(parts)) for name, parts in domains.items()}
    values = torch.tensor(list(norms.values()), dtype=torch.float64)
    std = float(values.std()) if len(values) > 1 else 0.0
    return Heterogeneity(norms, float(values.mean()), std, float(values.square().mean()))
