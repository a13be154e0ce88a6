"""The cost of a network: parameters, and multiply-accumulates of one forward pass."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rayfed.models.split_model import example_inputs


class Cost(NamedTuple):
    """The number of trainable parameters, and the multiply-accumulates of the forward pass of one example.

    Multiply-accumulates of biases, normalisation and activations are not counted, as in the papers.
    """

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Cost:
    """Return the cost of `model` on one input of `shape`, by torch's counter of the operations that are run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    x = example_inputs(shape, dtype)[:1]
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _unfused(), FlopCounterMode(display=False) as counter:
            model(x.to(next(model.parameters()).device))
    finally:
        for part, mode in modes:
            part.training = mode
    return Cost(parameters, counter.get_total_flops() // 2)


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Run attention and recurrent layers as separate products.

    The counter does not know fused kernels, and would count a whole encoder layer, or an LSTM over all its steps, as 0.
    """
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
