"""IRM's penalty: Arjovsky et al. 2019, "Invariant Risk Minimization", Eq. IRMv1, and that of de Luca et al.'s code."""

from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ProblemSpec
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Output, Task
from rayfed.core.trees import Weights


def slope(task: Task, logits: Tensor, y: Tensor, weights: Weights | None = None) -> Tensor:
    """Return ∂ loss(w · logits, y)/∂w at w = 1, a scalar that can be differentiated again."""

    def scaled(w: Weights) -> tuple[Tensor, Weights]:
        return task.loss(w["w"] * logits, y, weights), {}

    one = torch.ones((), device=logits.device, dtype=logits.dtype)
    return gradients(scaled, {"w": one}, create_graph=True)[0]["w"]


def last_layer(task: Task) -> str | None:
    """Return the name of the weights of the head's last linear layer, if there is one."""
    weights = task.initial_weights()
    layers = [name for name in task.trainable if name in task.head_names and weights[name].dim() == 2]
    return layers[-1] if layers else None


def last_layer_gradient(task: Task, weights: Weights, features: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the loss with respect to the last layer's weights; it can be differentiated again."""
    name = last_layer(task)
    assert name is not None  # `check_penalty` refuses it

    def loss(trained: Weights) -> tuple[Tensor, Weights]:
        return task.loss(task.head(weights | trained, features), y, weights), {}

    return gradients(loss, {name: weights[name]}, create_graph=True)[0][name]


def penalty_option() -> Any:
    """Declare the option of a method with this penalty."""
    return option(
        "scale",
        choices=("scale", "weights"),
        help="the squared gradient: by the logits' scale, or the last layer's weights",
    )


def check_penalty(problem: ProblemSpec, penalty: str) -> None:
    """Raise UsageError if the penalty needs a layer that the model does not have."""
    if penalty == "weights" and last_layer(problem.task) is None:
        raise UsageError("algorithm.penalty=weights: the model's head has no linear layer; use algorithm.penalty=scale")


def penalised_loss(
    task: Task, penalty: str, beta: Tensor | float, loss: Tensor, weights: Weights, output: Output, y: Tensor
) -> Tensor:
    """Return [loss + β ‖g‖²] / max(β, 1), g being `slope` with the penalty "scale", else `last_layer_gradient`."""
    if not isinstance(beta, Tensor):
        beta = torch.full((), beta, device=loss.device, dtype=loss.dtype)  # filled there: a copy would wait for the GPU
    by_scale = penalty == "scale"
    g = slope(task, output.logits, y, weights) if by_scale else last_layer_gradient(task, weights, output.features, y)
    return (loss + beta * g.square().sum()) / beta.clamp(min=1)
