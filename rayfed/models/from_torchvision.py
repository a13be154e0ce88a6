"""torchvision's classification networks: any of them as `torchvision` with `arch`, common ones by their own name."""

import dataclasses
from collections import OrderedDict
from typing import Any
from urllib.error import URLError

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel, split_after

_RESNET_STAGES = ("stem", "layer1", "layer2", "layer3", "layer4", "pool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchvisionOptions(ModelOptions):
    """Options of all torchvision networks."""

    norm: str = option(
        "batch", choices=("batch", "group"), help="normalisation layers; group replaces batch norm by GroupNorm"
    )
    groups: int = option(2, low=1, help="number of groups if norm=group")
    small_stem: bool = option(False, help="no downsampling in the stem (stride 1, no pooling), for small images")
    pretrained: bool = option(False, help="start from torchvision's ImageNet weights, from torch's cache or downloaded")

    def create(self, arch: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Create the network `arch` for the options, input channels and classes, without a split."""
        channels, _, _ = self.image_shape(shape)
        network = _create(arch, self.pretrained, num_classes)
        if self.norm == "group":
            replace_batch_norm(network, self.groups)
        if self.small_stem:
            adapt_stem_to_small_images(network)
        set_input_channels(network, channels)
        return network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torchvision(TorchvisionOptions):
    """Any classification network of torchvision, split before its last layer or `model.head` where that is needed."""

    name = "torchvision"
    arch: str = option(help="name of the network in torchvision, such as mobilenet_v3_large or convnext_tiny")

    def network(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return self.create(self.arch, shape, num_classes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(TorchvisionOptions):
    """ResNets (He et al., CVPR 2016) with the split points of DBE's table 7.

    Representations of ResNet-18 for 64x64: stem and layer1 64x16x16, layer2 128x8x8, layer3 256x4x4, layer4 512x2x2,
    pool 512.
    """

    split: str = option("pool", choices=_RESNET_STAGES, help="stage whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        if self.projection is not None and self.split != "pool":
            raise UsageError(f"model.projection={self.projection}: requires model.split=pool, got {self.split}")
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for name, layer in self.create(self.name, shape, num_classes).named_children():
            if name == "fc":
                layers["flatten"] = nn.Flatten()
            layers[name] = layer
        last = {"stem": "maxpool", "pool": "flatten"}.get(self.split, self.split)
        return split_after(layers, last, shape)


class ResNet18(ResNet):
    """ResNet-18; 11.2 million parameters."""

    name = "resnet18"


class ResNet34(ResNet):
    """ResNet-34; 21.3 million parameters."""

    name = "resnet34"


class ResNet50(ResNet):
    """ResNet-50, the encoder of ADCOL; 23.5 million parameters."""

    name = "resnet50"


class VGG11(TorchvisionOptions):
    """VGG-11 (Simonyan and Zisserman, ICLR 2015) with its classifier of two hidden layers of 4096."""

    name = "vgg11"

    def network(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return self.create(self.name, shape, num_classes)


def _create(arch: str, pretrained: bool, num_classes: int) -> nn.Module:
    from torchvision import models

    names = models.list_models(module=models)
    if arch not in names:
        raise UsageError(f"model.arch={arch}: torchvision has no such network; {suggestion(arch, names)}")
    if not pretrained:
        extra = {}
        if arch in ("googlenet", "inception_v3"):  # no algorithm handles their auxiliary outputs
            extra = {"aux_logits": False, "init_weights": True}
        untrained: nn.Module = models.get_model(arch, weights=None, num_classes=num_classes, **extra)
        return untrained
    try:
        network: nn.Module = models.get_model(arch, weights="DEFAULT")
    except (URLError, ConnectionError, TimeoutError, RuntimeError) as error:
        folder = torch.hub.get_dir()
        raise UsageError(
            f"model.pretrained=true: could not download the weights of {arch} ({error}); "
            f"put them into {folder}/checkpoints, or set model.pretrained=false"
        ) from error
    set_classes(network, num_classes)
    return network


def set_classes(module: nn.Module, classes: int) -> None:
    """Replace the last linear or convolutional layer by a newly initialised one with `classes` outputs."""
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))}
    name, last = layers.popitem()
    if isinstance(last, nn.Linear):
        module.set_submodule(name, nn.Linear(last.in_features, classes))
    else:
        kernel: Any = last.kernel_size
        module.set_submodule(name, nn.Conv2d(last.in_channels, classes, kernel))


def replace_batch_norm(module: nn.Module, groups: int) -> None:
    """Replace every batch-norm layer of `module`, identified by type, by a new `GroupNorm(groups)`."""
    for name, layer in list(module.named_modules()):
        if isinstance(layer, _BatchNorm):
            module.set_submodule(name, nn.GroupNorm(groups, layer.num_features))


def adapt_stem_to_small_images(module: nn.Module) -> None:
    """Remove downsampling from the stem: the usual change to ImageNet networks for images of 28x28 or 32x32.

    If the first convolution has a stride, it gets stride 1 and a kernel of at most 3x3. Then a max pooling between it
    and the second convolution is removed, too. Otherwise the network is not modified.
    """
    layers = dict(module.named_modules())
    convolutions = [name for name, layer in layers.items() if isinstance(layer, nn.Conv2d)]
    first_name, second_name = convolutions[:2]
    first: Any = layers[first_name]
    if max(first.stride) == 1:
        return
    size = min(3, int(first.kernel_size[0]))
    module.set_submodule(first_name, _conv_like(first, kernel_size=size, stride=1, padding=size // 2))
    names = list(layers)
    for name in names[names.index(first_name) : names.index(second_name)]:
        if isinstance(layers[name], nn.MaxPool2d):
            module.set_submodule(name, nn.Identity())


def set_input_channels(module: nn.Module, channels: int) -> None:
    """Replace the first convolution by a newly initialised one for images with `channels` channels.

    For one channel, the new weights are the sum of the old ones over channels. This is equivalent to repeating a grey
    image in all channels, so pretrained weights stay useful.
    """
    convolutions = ((name, layer) for name, layer in module.named_modules() if isinstance(layer, nn.Conv2d))
    name, first = next(convolutions)
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
    }
    new = nn.Conv2d(out_channels=old.out_channels, bias=old.bias is not None, **(arguments | changes))
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")
    if new.bias is not None:
        nn.init.zeros_(new.bias)
    return new
