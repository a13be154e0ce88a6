"""IRM's penalty: Arjovsky et al. 2019, "Invariant Risk Minimization", Eq. IRMv1."""

import torch
from torch import Tensor

from rayfed.core.network import gradients
from rayfed.core.task import Task
from rayfed.core.trees import Weights


def slope(task: Task, logits: Tensor, y: Tensor) -> Tensor:
    """Return ∂ loss(w · logits, y)/∂w at w = 1, a scalar that can be differentiated again."""

    def scaled(w: Weights) -> tuple[Tensor, Weights]:
        return task.loss(w["w"] * logits, y), {}

    one = torch.ones((), device=logits.device, dtype=logits.dtype)
    return gradients(scaled, {"w": one}, create_graph=True)[0]["w"]


def penalised_loss(task: Task, loss: Tensor, logits: Tensor, y: Tensor, beta: Tensor | float) -> Tensor:
    """Return [loss + β g²] / max(β, 1), g being the `slope`."""
    beta = torch.as_tensor(beta, device=loss.device, dtype=loss.dtype)
    return (loss + beta * slope(task, logits, y).square()) / beta.clamp(min=1)
