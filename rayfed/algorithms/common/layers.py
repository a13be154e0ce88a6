"""The layers of a model, and the mixing of two copies of it layer by layer (PartialFed)."""

import torch
from torch import Tensor

from rayfed.core.task import Task
from rayfed.core.trees import Weights


def layers(task: Task) -> dict[str, int]:
    """For each weight that travels, the position of its layer: what comes before the last dot of its name."""
    names = [name for name in task.initial_weights() if name not in task.personal_names]
    order = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
    return {name: order.index(name.rpartition(".")[0]) for name in names}


def mixed(common: Weights, own: Weights, load: Tensor, where: dict[str, int]) -> Weights:
    """Layer by layer `common` where `load` [layers] is 1 and `own` where it is 0; counters are those of `common`."""
    return {
        name: torch.lerp(own[name], common[name], load[where[name]]) if own[name].is_floating_point() else common[name]
        for name in own
    }
