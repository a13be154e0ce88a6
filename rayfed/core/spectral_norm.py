"""The vectors of spectral normalisation: buffers that follow from the weight, so that no mean is taken."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm


def set_singular_vectors(module: nn.Module) -> None:
    """Give every spectral normalisation of `module` the first singular vectors of its present weight.

    torch has the layers of `nn.utils.parametrizations.spectral_norm` and of `nn.utils.spectral_norm`.
    """
    for layer in module.modules():
        if isinstance(layer, ParametrizationList) and any(map(_has_vectors, layer)):
            count = 1 if layer.is_tensor else layer.ntensors
            weights = [layer.original] if layer.is_tensor else [getattr(layer, f"original{i}") for i in range(count)]
            step: Any
            for step in layer:
                if _has_vectors(step):
                    step._u, step._v = _singular_vectors(step._reshape_weight_to_matrix(weights[0]), step._u)
                weights = [step(*weights)]
        for hook in _old_hooks(layer):
            matrix = hook.reshape_weight_to_matrix(getattr(layer, f"{hook.name}_orig"))
            u, v = _singular_vectors(matrix, getattr(layer, f"{hook.name}_u"))
            setattr(layer, f"{hook.name}_u", u)
            setattr(layer, f"{hook.name}_v", v)


def spectral_layers(module: nn.Module) -> list[tuple[list[str], list[str]]]:
    """Return the names of the parameters and of the buffers of each layer whose vectors `set_singular_vectors` sets."""
    layers = []
    for prefix, layer in module.named_modules():
        new = isinstance(layer, ParametrizationList) and any(map(_has_vectors, layer))
        if new or any(_old_hooks(layer)):
            parameters = layer.named_parameters(prefix, recurse=new)
            buffers = layer.named_buffers(prefix, recurse=new)
            layers.append(([name for name, _ in parameters], [name for name, _ in buffers]))
    return layers


def _has_vectors(layer: nn.Module) -> bool:
    return isinstance(layer, _SpectralNorm) and getattr(layer, "_u", None) is not None  # vectors need none


def _old_hooks(layer: nn.Module) -> Iterator[Any]:
    hooks = (hook for hook in layer._forward_pre_hooks.values() if isinstance(hook, SpectralNorm))
    return (hook for hook in hooks if getattr(layer, f"{hook.name}_u") is not None)


def _singular_vectors(matrix: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first left and right singular vectors of `matrix`, with the sign that is closer to that of `u`."""
    threads, exact = torch.get_num_threads(), matrix.detach().to("cpu", torch.float64)
    torch.set_num_threads(1)  # the number of threads changes rounding
    try:
        is_wide = exact.shape[0] <= exact.shape[1]
        gram = exact @ exact.mT if is_wide else exact.mT @ exact
        first = torch.linalg.eigh(gram).eigenvectors[:, -1]
        other = F.normalize((exact.mT if is_wide else exact) @ first, dim=0)
        left, right = (first, other) if is_wide else (other, first)
        sign = -1 if left @ u.detach().to(left) < 0 else 1
    finally:
        torch.set_num_threads(threads)
    return (sign * left).to(u), (sign * right).to(u)
