"""Convolutions as products of matrices: every patch of the image under the kernel is a row, the kernels are columns.

Of the convolutions of K clients, `torch.vmap` makes a grouped one, for which cuDNN starts several kernels per client.
The product starts the same few kernels for any K: the second layer of the CNN takes 0.8 ms of an H100 instead of 4.4,
forward and backward, for 64 clients with batches of 10.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PATCHES_BYTES = 2**23
"""The most bytes of a client's patches, which autograd keeps for every layer. Larger layers gain little."""
_Sizes = tuple[int, ...]


def is_plain(layer: nn.Module) -> bool:
    """Return whether `convolve` computes what `layer` does, which nobody has changed."""
    return (
        isinstance(layer, nn.Conv2d)
        and getattr(layer._conv_forward, "__func__", None) is nn.Conv2d._conv_forward
        and (layer.groups, layer.dilation, layer.padding_mode) == (1, (1, 1), "zeros")
        and not isinstance(layer.padding, str)
    )


def is_faster(x: Tensor, weight: Tensor, stride: _Sizes, padding: _Sizes) -> bool:
    """Return whether `convolve` is faster than cuDNN under `torch.vmap`, which it is for small layers without TF32."""
    if not (_on_gpu(x) and x.dim() == 4 and x.dtype == weight.dtype == torch.float32):
        return False
    if torch.is_autocast_enabled(x.device.type) or torch.backends.cudnn.allow_tf32:
        return False
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, strict=True)
    places = math.prod((size + 2 * pad - kernel) // step + 1 for size, kernel, step, pad in sides)
    return len(x) * places * weight[0].numel() * x.element_size() <= PATCHES_BYTES


def _on_gpu(x: Tensor) -> bool:
    return x.is_cuda  # on a CPU the product takes 2 to 4 times as long


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, stride: _Sizes, padding: _Sizes) -> Tensor:
    """Return `F.conv2d(x, weight, bias, stride, padding)` for `x` [batch, channels, height, width]."""
    if any(padding):
        x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    kernel = weight.shape[2:]
    to_patches = partial(_patches, kernel=kernel, stride=stride)
    to_images = partial(_images, shape=x.shape[1:], kernel=kernel, stride=stride)
    patches = _Linear.apply(x, to_patches, to_images)  # type: ignore[no-untyped-call]
    return F.linear(patches, weight.flatten(1), bias).permute(0, 3, 1, 2)


def _patches(x: Tensor, *, kernel: _Sizes, stride: _Sizes) -> Tensor:
    """Return the patches [batch, rows, columns, channels * kernel] of images [batch, channels, height, width]."""
    unfolded = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1])
    return unfolded.permute(0, 2, 3, 1, 4, 5).flatten(3)


def _images(patches: Tensor, *, shape: _Sizes, kernel: _Sizes, stride: _Sizes) -> Tensor:
    """Return the images [batch, *shape] in which each pixel is the sum of itself in all `patches`."""
    unfolded = patches.unflatten(3, (shape[0], *kernel)).permute(0, 3, 1, 2, 4, 5)
    batch, channels, rows = unfolded.shape[:3]
    strips = [batch, channels, rows, shape[2], kernel[0]]
    folded = torch.ops.aten.unfold_backward(unfolded, strips, 3, kernel[1], stride[1])
    return cast(Tensor, torch.ops.aten.unfold_backward(folded, [batch, *shape], 2, kernel[0], stride[0]))


_Function = Callable[[Tensor], Tensor]


class _Linear(torch.autograd.Function):
    """A linear function of images, each on its own, with its transpose, which is its gradient."""

    @staticmethod
    def forward(x: Tensor, function: _Function, transpose: _Function) -> Tensor:
        return function(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.function, ctx.transpose = inputs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _Linear.apply(grad, ctx.transpose, ctx.function), None, None  # type: ignore[no-untyped-call]

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: None) -> Any:
        return _Linear.apply(tangent, ctx.function, ctx.transpose)  # type: ignore[no-untyped-call]

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None, None], x: Tensor, *functions: _Function) -> tuple[Tensor, int]:
        x = x.movedim(in_dims[0], 0)
        merged = _Linear.apply(x.flatten(0, 1), *functions)  # type: ignore[no-untyped-call]
        return merged.unflatten(0, x.shape[:2]), 0
