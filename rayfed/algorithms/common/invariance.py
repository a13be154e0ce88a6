"""IRM's penalty: the squared slope of a loss along a common factor of all logits (Arjovsky et al. 2019, IRMv1)."""

import torch
from torch import Tensor

from rayfed.core.network import gradients
from rayfed.core.task import Task
from rayfed.core.trees import Weights


def slope(task: Task, logits: Tensor, y: Tensor) -> Tensor:
    """∂ loss(w · logits, y)/∂w at w = 1, a scalar that can itself be differentiated."""

    def scaled(w: Weights) -> tuple[Tensor, Weights]:
        return task.loss(w["w"] * logits, y), {}

    one = torch.ones((), device=logits.device, dtype=logits.dtype)
    return gradients(scaled, {"w": one}, create_graph=True)[0]["w"]


def invariant(task: Task, loss: Tensor, logits: Tensor, y: Tensor, beta: Tensor | float) -> Tensor:
    """[loss + β g²] / max(β, 1)."""
    beta = torch.as_tensor(beta, device=loss.device, dtype=loss.dtype)
    return (loss + beta * slope(task, logits, y).square()) / beta.clamp(min=1)
