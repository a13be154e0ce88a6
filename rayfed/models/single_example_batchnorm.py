"""Training batches of one example, on which batch norm may not be able to train."""

import math
from collections.abc import Sequence

import torch

from rayfed.core.layout import layout_of
from rayfed.core.modules import batch_norm_layers
from rayfed.core.rng import global_state_kept
from rayfed.core.task import Task
from rayfed.core.trees import Weights


def leaves_single_example(
    examples: int, batch_size: int, *, epochs: int | None, steps: int | None, drop_last: bool
) -> bool:
    """Return whether training on `examples` examples has a batch of one; `steps` overrides `epochs`."""
    if batch_size == 1:
        return True
    reaches_last_batch = bool(epochs)
    if steps is not None:
        reaches_last_batch = steps >= math.ceil(examples / batch_size)
    drops_it = drop_last and examples > 1  # the only example of a client is never dropped
    return reaches_last_batch and not drops_it and examples % batch_size == 1


def batch_size_advice(batch_size: int, *, enough: bool) -> str:
    """Return the advice at the end of an error message; `enough`: the client has examples for larger batches."""
    if not enough:
        return "partition.* must give it more"
    if batch_size == 1:
        return "use at least 2"
    return "use another size, or local.drop_last=true"


def trains_on_single_examples(task: Task, shape: Sequence[int], *, tokens: bool) -> bool:
    """Return whether the task's network can train on a batch of one example.

    The network is tried: batch norm can average over the positions of a feature map, but not over a single vector.
    `shape` is that of one input; `tokens` says whether inputs are integers that stand for words.
    """
    if not batch_norm_layers(task.model.module):
        return True
    weights = task.initial_weights()
    dtype = _input_dtype(task, weights, tokens)
    with global_state_kept(), torch.no_grad():  # dropout draws random numbers
        try:
            task.forward(weights, torch.zeros(1, *shape, dtype=dtype, device=task.device))
        except ValueError:  # torch: "Expected more than 1 value per channel when training"
            return False
    return True


def _input_dtype(task: Task, weights: Weights, tokens: bool) -> torch.dtype:
    """Return the type of the network's inputs."""
    if not tokens:
        return next(value.dtype for value in weights.values() if value.is_floating_point())
    if layout_of(task.model.module) is None:
        return torch.long
    return torch.int32
