"""Changes to a finished network: another normalisation, a stem for small images, another number of channels."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.core.errors import UsageError


def replace_batch_norm(module: nn.Module, groups: int) -> None:
    """Replaces every batch norm in `module`, found by type, by a fresh `GroupNorm(groups)` of as many channels.

    Raises:
        UsageError: `groups` does not divide some layer's channels.
    """
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _BatchNorm):
            if layer.num_features % groups:
                raise UsageError(f"model.groups={groups}: does not divide the {layer.num_features} channels of {name}")
            module.set_submodule(name, nn.GroupNorm(groups, layer.num_features))


def adapt_stem_to_small_images(module: nn.Module) -> None:
    """Keeps small images at full size at the entrance: the usual change to ImageNet networks for 28x28 or 32x32.

    The first convolution, where it has a stride, gets stride 1 (and 3x3 where it was wider), and a max pooling between
    it and the second convolution goes. A network whose first convolution has no stride stays as it is.
    """
    convolutions = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d)]
    (first_name, first), (second_name, _) = convolutions[:2]
    if max(first.stride) == 1:
        return
    size = min(3, int(first.kernel_size[0]))
    module.set_submodule(first_name, _like(first, kernel_size=size, stride=1, padding=size // 2))
    names = [name for name, _ in module.named_modules()]
    for name in names[names.index(first_name) : names.index(second_name)]:
        if isinstance(module.get_submodule(name), nn.MaxPool2d):
            module.set_submodule(name, nn.Identity())


def set_input_channels(module: nn.Module, channels: int) -> None:
    """Rebuilds the first convolution for images of `channels` channels, freshly drawn.

    For one channel the new weights are the sum over the old channels, which is what a grey image repeated in all of
    them would meet, so that pretrained weights stay useful.
    """
    name, first = next((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d))
    if first.in_channels == channels:
        return
    rebuilt = _like(first, in_channels=channels)
    if channels == 1:
        with torch.no_grad():
            rebuilt.weight.copy_(first.weight.sum(dim=1, keepdim=True))
    module.set_submodule(name, rebuilt)


def _like(old: nn.Conv2d, **changes: Any) -> nn.Conv2d:
    """A fresh convolution as `old`, with `changes`; drawn as torchvision draws its own (He, fan out)."""
    settings: dict[str, Any] = {
        "in_channels": old.in_channels,
        "kernel_size": old.kernel_size,
        "stride": old.stride,
        "padding": old.padding,
    } | changes
    new = nn.Conv2d(out_channels=old.out_channels, bias=old.bias is not None, **settings)
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new
