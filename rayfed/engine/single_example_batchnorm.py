"""Training batches of one example, of which batch norm may find no spread."""

import math
from collections.abc import Sequence

import torch

from rayfed.algorithm import Phase
from rayfed.core.rng import torch_state_kept
from rayfed.core.task import Task


def comes_to_one(phase: Phase, examples: int, batch_size: int, *, drop_last: bool) -> bool:
    """Whether `phase` of a client with so many examples has a batch of one; `batch_size` is the configured one."""
    size = phase.batch_size or batch_size
    in_an_epoch = math.ceil(examples / size)
    to_the_end = bool(phase.epochs) if phase.steps is None else phase.steps >= in_an_epoch
    return size == 1 or (to_the_end and not drop_last and examples % size == 1)


def remedy(batch_size: int, *, enough: bool) -> str:
    """What to do about it, for the end of a message; `enough`: whether the client has rows for larger batches."""
    if not enough:
        return "partition.* must give it more"
    return "use at least 2" if batch_size == 1 else "use another size, or local.drop_last=true"


def trains_on_one(task: Task, shape: Sequence[int], *, tokens: bool) -> bool:
    """Whether the task's network can train on one example of `shape`: tried out, for feature maps of several places
    give batch norm something to average over, and vectors do not. `tokens`: inputs are numbers of words."""
    if not task.batch_norm_names:
        return True
    weights = task.initial_weights()
    kind = torch.long if tokens else next(v.dtype for v in weights.values() if v.is_floating_point())
    with torch_state_kept(), torch.no_grad():  # dropout draws
        try:
            task.forward(weights, torch.zeros(1, *shape, dtype=kind, device=task.device))
        except ValueError:  # torch's "Expected more than 1 value per channel when training"
            return False
    return True
