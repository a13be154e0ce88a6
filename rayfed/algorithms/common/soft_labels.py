"""Labels as class probabilities and one-hot vectors."""

import torch
from torch import Tensor

from rayfed.algorithm import ProblemSpec
from rayfed.core.errors import UsageError
from rayfed.core.task import Task


def soft(y: Tensor, task: Task) -> Tensor:
    """Return labels that have a mean: class probabilities on the axis of the classes, in place of indices.

    Floats, such as probabilities, are returned unchanged, and bits and other integers that are no indices as floats.
    """
    kind, axis, _ = task.outputs
    if y.is_floating_point():
        return y
    if axis is None or kind == "binary":
        return y.float()
    return one_hot(y, task.num_outputs).movedim(-1, axis)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """Return one-hot vectors [batch, ..., classes], empty for 0 classes. Unlike torch's, it runs under `vmap`."""
    indices = torch.arange(classes, device=y.device)
    return (y[..., None] == indices).float()


def check_real_inputs(problem: ProblemSpec, name: str) -> None:
    """Raise UsageError if inputs are word indices, with which the method cannot compute."""
    if not problem.task.inputs.continuous:
        raise UsageError(f"algorithm.name={name}: needs continuous inputs, and those of this dataset are word indices")
