"""What a network costs: parameters, and multiply-accumulates of one forward pass."""

from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from rayfed.models.split import example


class Cost(NamedTuple):
    """Trainable numbers, and multiply-accumulates of the forward pass of one example; biases, norms and activations
    are not counted, as papers do not."""

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Cost:
    """The cost of `model` on one input of `shape`, by torch's own counter, which sees every operation that is run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    x = example(shape, dtype)[:1]
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            model(x.to(next(model.parameters()).device))
    finally:
        for part, mode in modes:
            part.training = mode
    return Cost(parameters, counter.get_total_flops() // 2)
