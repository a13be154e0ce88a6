"""Replacement of layers of a network: its normalisation, its stem for small images, its number of input channels."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.core.errors import UsageError


def replace_batch_norm(module: nn.Module, groups: int) -> None:
    """Replace every batch-norm layer of `module`, identified by type, by a new `GroupNorm(groups)`.

    Raises:
        UsageError: `groups` does not divide the number of channels of a layer.
    """
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _BatchNorm):
            if layer.num_features % groups:
                raise UsageError(f"model.groups={groups}: does not divide the {layer.num_features} channels of {name}")
            module.set_submodule(name, nn.GroupNorm(groups, layer.num_features))


def adapt_stem_to_small_images(module: nn.Module) -> None:
    """Remove downsampling from the stem: the usual change to ImageNet networks for images of 28x28 or 32x32.

    If the first convolution has a stride, it gets stride 1 and a kernel of at most 3x3, and a max pooling between it
    and the second convolution is removed. Otherwise the network is not modified.
    """
    convolutions = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)]
    (first_name, first), (second_name, _) = convolutions[:2]
    if max(first.stride) == 1:
        return
    size = min(3, int(first.kernel_size[0]))
    module.set_submodule(first_name, _conv_like(first, kernel_size=size, stride=1, padding=size // 2))
    names = [name for name, _ in module.named_modules()]
    for name in names[names.index(first_name) : names.index(second_name)]:
        if isinstance(module.get_submodule(name), nn.MaxPool2d):
            module.set_submodule(name, nn.Identity())


def set_input_channels(module: nn.Module, channels: int) -> None:
    """Replace the first convolution by a newly initialised one for images with `channels` channels.

    For one channel, the new weights are the sum of the old ones over channels. This is equivalent to repeating a grey
    image in all channels, so pretrained weights stay useful.
    """
    name, first = next((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d))
    if first.in_channels == channels:
        return
    rebuilt = _conv_like(first, in_channels=channels)
    if channels == 1:
        with torch.no_grad():
            rebuilt.weight.copy_(first.weight.sum(dim=1, keepdim=True))
    module.set_submodule(name, rebuilt)


def _conv_like(old: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """Create a convolution like `old` with `changes`, initialised as in torchvision (He, fan out)."""
    arguments: dict[str, Any] = {
        "in_channels": old.in_channels,
        "kernel_size": old.kernel_size,
        "stride": old.stride,
        "padding": old.padding,
    } | changes
    new = nn.Conv2d(out_channels=old.out_channels, bias=old.bias is not None, **arguments)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new
