"""Labels as class probabilities and one-hot vectors."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import ProblemSpec
from rayfed.core.errors import UsageError


def soft(y: Tensor, classes: int) -> Tensor:
    """Return class probabilities [batch, classes] of class indices; probabilities are returned unchanged."""
    return y if y.is_floating_point() else F.one_hot(y, classes).float()


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return one-hot vectors [batch, classes]; they are empty for 0 classes. Unlike torch's, it runs under `vmap`."""
    return (y[:, None] == torch.arange(classes, device=y.device)).float()


def check_real_inputs(problem: ProblemSpec, name: str) -> None:
    """Raise UsageError if inputs are word indices, with which the method cannot compute."""
    if not problem.task.inputs.continuous:
        raise UsageError(f"algorithm.name={name}: needs continuous inputs, and those of this dataset are word indices")
