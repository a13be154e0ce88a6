"""What a network costs: parameters, and multiply-accumulates of one forward pass."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rayfed.models.split_model import example_inputs


class Cost(NamedTuple):
    """Trainable numbers, and multiply-accumulates of the forward pass of one example; biases, norms and activations
    are not counted, as papers do not."""

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Cost:
    """The cost of `model` on one input of `shape`, by torch's own counter, which sees every operation that is run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    x = example_inputs(shape, dtype)[:1]
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _step_by_step(), FlopCounterMode(display=False) as counter:
            model(x.to(next(model.parameters()).device))
    finally:
        for part, mode in modes:
            part.training = mode
    return Cost(parameters, counter.get_total_flops() // 2)


@contextlib.contextmanager
def _step_by_step() -> Iterator[None]:
    """Attention and recurrent layers as the products that they consist of: the counter knows no fused kernel, and
    would take a whole encoder layer, or an LSTM over all its steps, for nothing."""
    backends = torch.backends
    fast, mkldnn, cudnn = backends.mha.get_fastpath_enabled(), backends.mkldnn.enabled, backends.cudnn.enabled
    backends.mha.set_fastpath_enabled(False)
    backends.mkldnn.enabled = False  # type: ignore[assignment]
    backends.cudnn.enabled = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        backends.mha.set_fastpath_enabled(fast)
        backends.mkldnn.enabled = mkldnn
        backends.cudnn.enabled = cudnn
