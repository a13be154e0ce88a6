"""torchvision's classification networks: any of them by `arch`, common ones by their own names."""

import dataclasses
from collections import OrderedDict
from typing import Any, ClassVar
from urllib.error import URLError

import torch
from torch import nn

from rayfed.core import torchvision_cpu
from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.models import layer_replacement
from rayfed.models.base import ModelOptions
from rayfed.models.split_model import SplitModel, split_after, split_last_linear

_RESNET_STAGES = ("stem", "layer1", "layer2", "layer3", "layer4", "pool")
_ONE_OUTPUT = {"aux_logits": False, "init_weights": True}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorchvisionOptions(ModelOptions):
    """What can be changed about any of torchvision's networks."""

    norm: str = option("batch", choices=("batch", "group"), help="group: every batch norm becomes a GroupNorm")
    groups: int = option(2, low=1, help="number of groups with norm=group")
    small_stem: bool = option(False, help="keep small images at full size at the entrance (stride 1, no pooling)")
    pretrained: bool = option(False, help="start from torchvision's ImageNet weights, fetched or in torch's cache")

    def create(self, arch: str, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """torchvision's network, fitted to the options, the channels and the classes, not yet split."""
        channels, _, _ = self.image_shape(shape)
        network = _create(arch, self.pretrained, num_classes)
        if self.norm == "group":
            layer_replacement.replace_batch_norm(network, self.groups)
        if self.small_stem:
            layer_replacement.adapt_stem_to_small_images(network)
        layer_replacement.set_input_channels(network, channels)
        return network


@dataclasses.dataclass(frozen=True, kw_only=True)
class Torchvision(TorchvisionOptions):
    """Any classification network of torchvision that ends in a linear layer, split before that layer."""

    name: ClassVar[str] = "torchvision"
    arch: str = option(help="torchvision's name of the network, such as mobilenet_v3_large or convnext_tiny")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        return split_last_linear(self.create(self.arch, shape, num_classes), shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedTorchvision(TorchvisionOptions):
    """A network whose torchvision name is its name here too, split before its last linear layer."""

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        return split_last_linear(self.create(self.name, shape, num_classes), shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNet(TorchvisionOptions):
    """He et al. (CVPR 2016), with the split points of DBE's table 7.

    Representations of ResNet-18 on 64x64: stem and layer1 64x16x16, layer2 128x8x8, layer3 256x4x4, layer4 512x2x2,
    pool 512.
    """

    split: str = option("pool", choices=_RESNET_STAGES, help="the stage whose output is the representation")

    def network(self, shape: tuple[int, ...], num_classes: int) -> SplitModel:
        if self.projection is not None and self.split != "pool":
            raise UsageError(f"model.projection={self.projection}: goes with model.split=pool, not {self.split}")
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
    """ResNet-50, ADCOL's encoder; 23.5 million parameters."""

    name = "resnet50"


class MobileNetV3Small(NamedTorchvision):
    """Howard et al. (ICCV 2019)."""

    name = "mobilenet_v3_small"


class EfficientNetB0(NamedTorchvision):
    """Tan and Le (ICML 2019)."""

    name = "efficientnet_b0"


class DenseNet121(NamedTorchvision):
    """Huang et al. (CVPR 2017)."""

    name = "densenet121"


class ShuffleNetV2(NamedTorchvision):
    """Ma et al. (ECCV 2018), width 1.0."""

    name = "shufflenet_v2_x1_0"


class VGG11(NamedTorchvision):
    """Simonyan and Zisserman (ICLR 2015), with its classifier of two hidden layers of 4096."""

    name = "vgg11"


def _create(arch: str, pretrained: bool, num_classes: int) -> nn.Module:
    torchvision_cpu.prepare()
    from torchvision import models

    known = models.list_models(module=models)
    if arch not in known:
        raise UsageError(f"model.arch={arch}: torchvision has no such network; {suggestion(arch, known)}")
    if not pretrained:
        # GoogLeNet and Inception would add auxiliary outputs, which no method here knows what to do with
        extra: dict[str, Any] = {"googlenet": _ONE_OUTPUT, "inception_v3": _ONE_OUTPUT}.get(arch, {})
        return models.get_model(arch, weights=None, num_classes=num_classes, **extra)
    try:
        network = models.get_model(arch, weights="DEFAULT")
    except (URLError, ConnectionError, TimeoutError, RuntimeError) as error:
        folder = torch.hub.get_dir()
        raise UsageError(
            f"model.pretrained=true: could not fetch the weights of {arch} ({error}); "
            f"put them into {folder}/checkpoints, or leave model.pretrained=false"
        ) from error
    name, last = [(name, layer) for name, layer in network.named_modules() if isinstance(layer, nn.Linear)][-1]
    network.set_submodule(name, nn.Linear(last.in_features, num_classes))
    return network
