"""A model with a projection head: its features end in an MLP, with a new linear classifier on top.

MOON uses it, and FedDebias for the variant of Fig. 5(a).
"""

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rayfed.algorithms.common.mlp import mlp
from rayfed.core.modules import copied
from rayfed.core.task import Task


class ModelWithProjection(nn.Module):
    """A model whose `features` are an MLP of the features of `model`, and whose `head` is linear.

    Args:
        model: The model, with `features`. It is copied.
        widths: The widths of the MLP, those of its input and output included.
        classes: The number of classes.
        unused: The names of the weights of the model's head, which this model leaves out.
    """

    def __init__(self, model: Any, widths: Sequence[int], classes: int, unused: frozenset[str]):
        super().__init__()
        self.model: Any = copied(model)
        slots = [id(value) for _, value in self.model.named_parameters(remove_duplicate=False)]
        tied = {name for name, value in self.model.named_parameters() if slots.count(id(value)) > 1}
        for name in unused - tied:  # the features may use tied weights
            module_name, _, weight_name = name.rpartition(".")
            module = self.model.get_submodule(module_name)
            table = module._parameters if weight_name in module._parameters else module._buffers
            table[weight_name] = None
        self.projection, self.head = mlp(widths), nn.Linear(widths[-1], classes)
        self.feature_shape = (widths[-1],)

    def features(self, x: Tensor) -> Tensor:
        return self.projection(self.model.features(x).flatten(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


OUTPUT_WIDTH = 256
"""The width of z in MOON's code."""


def with_projection(task: Task, widths: Sequence[int] | None) -> Task:
    """Return `task` with a projection head of `widths` on its model, by default that of its features and OUTPUT_WIDTH.

    The new weights are drawn from a seed that depends on the old ones, so that every host draws the same.
    """
    first = next(iter(task.initial_weights().values())).detach().cpu().contiguous()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(zlib.crc32(first.numpy().tobytes()))
        width = int(torch.Size(task.feature_shape).numel())
        widths = (width, OUTPUT_WIDTH) if widths is None else widths
        model = ModelWithProjection(task.model.module, [width, *widths], task.num_outputs, task.head_names)
    return task.with_model(model)
