"""The cost of a network: parameters, and multiply-accumulates of one forward pass."""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from rayfed.core.modules import unchanged
from rayfed.models.split_model import fitting_inputs


class Cost(NamedTuple):
    """The number of trainable parameters, and the multiply-accumulates of the forward pass of one example.

    Multiply-accumulates of biases, normalisation and activations are not counted, as in the papers.
    """

    parameters: int
    macs: int


def cost(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Cost:
    """Return the cost of `model` on one input of `shape`, by torch's counter of the operations that are run."""
    parameters = sum(parameter.numel() for parameter in model.parameters())
    x = fitting_inputs(model, shape, dtype)
    modes = [(part, part.training) for part in model.modules()]
    model.eval()
    try:
        with torch.no_grad(), _unfused(), unchanged(model), warnings.catch_warnings(action="ignore"):
            x = x.to(next(model.parameters()).device)
            try:
                flops = _flops(model, x[:1])
            except ValueError:  # batch norm without statistics
                flops = _flops(model, x) // 2
    finally:
        for part, mode in modes:
            part.training = mode
    return Cost(parameters, flops // 2)


def _flops(model: nn.Module, x: torch.Tensor) -> int:
    counter = _Counter()
    try:
        with counter:
            model(x)
    except Exception:  # an operation that only torch's own counter can look into, or an error of the model's
        from torch.utils.flop_counter import FlopCounterMode  # takes a tenth of a second, which a server need not wait

        with FlopCounterMode(display=False) as slower:
            model(x)
        return int(slower.get_total_flops())
    return counter.flops


class _Counter(TorchDispatchMode):
    """Adds up the floating-point operations of what is run, by torch's formulas.

    `FlopCounterMode` counts the same, but imports torch's compiler with its computer algebra: two seconds and 150 MB.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry

        self.flops = 0
        self._formulas = flop_registry

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to skip the compiler torch would import it

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = function._overloadpacket
        if kind not in self._formulas:
            with self:  # the parts of an operation that torch composes of others
                result = function.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = function(*args, **kwargs)
        if kind in self._formulas:
            self.flops += self._formulas[kind](*args, **kwargs, out_val=result)
        return result


@contextlib.contextmanager
def _unfused() -> Iterator[None]:
    """Run attention and recurrent layers as separate products.

    The counter does not know fused kernels: it would count 0 for an encoder layer or an LSTM.
    """
    backends = torch.backends
    fast = backends.mha.get_fastpath_enabled()
    mkldnn = backends.mkldnn.enabled
    cudnn = backends.cudnn.enabled
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
