"""Models by name: rayfed's own, or a user's `module:Class`."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rayfed.core import options as declared
from rayfed.core.errors import UsageError
from rayfed.core.registry import resolve
from rayfed.models.projection import with_projection
from rayfed.models.split_model import SplitModel, ensure_split

MODELS: Mapping[str, str] = {
    "mlp": "rayfed.models.mlp:MLP",
    "cnn": "rayfed.models.cnn:CNN",
    "cnn_rotated": "rayfed.models.cnn_rotated:RotatedCNN",
    "cnn_domainbed": "rayfed.models.cnn_domainbed:DomainBedCNN",
    "digits_cnn": "rayfed.models.digits_cnn:DigitsCNN",
    "cct": "rayfed.models.cct:CCT",
    "fasttext": "rayfed.models.fasttext:FastText",
    "har_cnn": "rayfed.models.har_cnn:HARCNN",
    "resnet18": "rayfed.models.from_torchvision:ResNet18",
    "resnet34": "rayfed.models.from_torchvision:ResNet34",
    "resnet50": "rayfed.models.from_torchvision:ResNet50",
    "mobilenet_v3_small": "rayfed.models.from_torchvision:MobileNetV3Small",
    "efficientnet_b0": "rayfed.models.from_torchvision:EfficientNetB0",
    "densenet121": "rayfed.models.from_torchvision:DenseNet121",
    "shufflenet_v2_x1_0": "rayfed.models.from_torchvision:ShuffleNetV2",
    "vgg11": "rayfed.models.from_torchvision:VGG11",
    "vgg11_mean": "rayfed.models.vgg11_mean:VGG11Mean",
    "torchvision": "rayfed.models.from_torchvision:Torchvision",
}


def build_model(
    name: str,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype = torch.float32,
) -> SplitModel:
    """The network called `name` for inputs of `shape` (one sample's) and type `dtype`, with its split point.

    `name` is one of `MODELS` or a user's `module:Thing`, where the thing is either a dataclass of options with
    `build(shape, num_classes)`, or an `nn.Module` class or function called with (shape, num_classes, **options).
    Initial weights are drawn from torch's global generator.

    Raises:
        UsageError: unknown name or option, or inputs that do not fit.
    """
    found, projection = _ready(name, options)
    module = found(tuple(shape), num_classes)
    if not isinstance(module, nn.Module):
        raise UsageError(f"model.name={name}: must make an nn.Module, got {type(module).__name__}")
    model = module if isinstance(module, SplitModel) and module.feature_shape else ensure_split(module, shape, dtype)
    return model if projection is None else with_projection(model, projection, num_classes)


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raises `UsageError` if `build_model` would refuse `name` or `options`; builds nothing."""
    _ready(name, options)


def _ready(name: str, options: Mapping[str, Any]) -> tuple[Callable[[tuple[int, ...], int], Any], int | None]:
    """What makes the network from shape and classes, and the projection that is still to be put in front of it."""
    found = resolve(name, MODELS, where="model.name")
    if inspect.isclass(found) and dataclasses.is_dataclass(found) and hasattr(found, "build"):
        return declared.build(found, options, where="model").build, None
    if not callable(found):
        raise UsageError(f"model.name={name}: must be a class or a function, got {type(found).__name__}")
    own = dict(options)
    projection = declared.checked(own.pop("projection", None), int | None, {"low": 1}, where="model.projection")
    try:
        inspect.signature(found).bind((), 0, **own)
    except TypeError as error:
        raise UsageError(f"model.name={name}: is called with (shape, num_classes, **options): {error}") from error
    return (lambda shape, num_classes: found(shape, num_classes, **own)), projection
