"""A model with an MLP appended to its extractor and a new linear classifier (MOON; FedDebias, Fig. 5(a))."""

import copy
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithms.common.mlp import mlp
from rayfed.core.errors import UsageError
from rayfed.core.task import Task


class Projected(nn.Module):
    """A model followed by an MLP and a linear head. The weights in `unused`, those of its own head, are removed."""

    def __init__(self, model: Any, widths: Sequence[int], classes: int, unused: frozenset[str]):
        super().__init__()
        self.model = copy.deepcopy(model)
        for name in unused:
            owner, _, leaf = name.rpartition(".")
            module = self.model.get_submodule(owner)
            table = module._parameters if leaf in module._parameters else module._buffers
            table[leaf] = None
        self.projection, self.head = mlp(widths), nn.Linear(widths[-1], classes)
        self.feature_shape = (widths[-1],)

    def features(self, x: Tensor) -> Tensor:
        return self.projection(self.model.features(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


def with_projection(task: Task, widths: Sequence[int]) -> Task:
    """Return the task with its model wrapped in `Projected`, whose MLP has layers of these widths.

    The initial weights of the new layers are seeded by those of the model, so that they are the same on every host.

    Raises:
        UsageError: The model has no split point.
    """
    if not task.feature_shape:
        raise UsageError(
            f"algorithm.widths={list(widths)}: an MLP after the model's features needs a model with a split point, "
            "features(x) and a module called head"
        )
    first = next(iter(task.initial_weights().values())).detach().cpu().contiguous()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(first.numpy().tobytes()))
        inputs = int(torch.Size(task.feature_shape).numel())
        model = Projected(task.model.module, [inputs, *widths], task.num_classes, task.head_names)
    return task.with_model(model)
