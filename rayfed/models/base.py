"""Creation of models by name, rayfed's or a user's, the base class of model options, and ADCOL's projection.

The projection before the split and its predictor: Li, He and Song, "Adversarial Collaborative Learning on Non-IID
Features", ICML 2023, section 5.1. The projection is that of SimSiam.
"""

import abc
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from rayfed.core.errors import UsageError, error_line
from rayfed.core.layout import Layout
from rayfed.core.options import arguments_for, build, checked, option
from rayfed.core.registry import resolve
from rayfed.models import MODELS
from rayfed.models.split_model import SplitModel, ensure_split, initialise_lazy_layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(abc.ABC):
    """Options of a family of models. `build` creates a newly initialised network.

    Initial weights are drawn from torch's global generator; seed it first for reproducible weights.
    """

    name: ClassVar[str]
    projection: int | None = option(
        None, low=1, help="width of ADCOL's projection before the split (2048 in the paper); null for no projection"
    )

    def build(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Create the network, with its projection if there is one.

        Args:
            shape: Shape of one input; (channels, height, width) for images.

        Raises:
            UsageError: The network cannot take inputs of this shape.
        """
        model = self.network(tuple(shape), num_classes)
        if self.projection is None:
            return model
        split = ensure_split(model, shape)
        return with_projection(split, self.projection, num_classes)

    @abc.abstractmethod
    def network(self, shape: tuple[int, ...], num_classes: int) -> nn.Module:
        """Create the network without a projection, and split it if its split is not before its last layer."""

    def image_shape(self, shape: tuple[int, ...], *, minimum: int = 1) -> tuple[int, int, int]:
        """Return `shape`, (channels, height, width), after a check that images have `minimum` pixels on each side."""
        fits = len(shape) == 3 and min(shape[1:]) >= minimum
        self.require(fits, f"images (channels x height x width) of at least {minimum}x{minimum}", shape)
        channels, height, width = shape
        return channels, height, width

    def require(self, fits: bool, needed: str, shape: tuple[int, ...]) -> None:
        """Raise UsageError unless inputs of `shape` are what the network needs."""
        if not fits:
            got = "x".join(map(str, shape))
            raise UsageError(f"model.name={self.name}: needs {needed}, got inputs of {got}")


def scaled_channels(channels: int, width: float) -> int:
    """Return the number of channels times the width multiplier, at least one."""
    return max(1, round(channels * width))


def hidden_layer(inputs: int, outputs: int) -> list[nn.Module]:
    """Return a linear layer with batch norm and ReLU."""
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


def with_projection(model: SplitModel, dim: int, num_classes: int) -> SplitModel:
    """Append a projection to `dim` values to the features of `model` and replace its head by a predictor.

    The projection has three linear layers of width `dim` with batch norm and two ReLUs. The predictor has one hidden
    layer of 512 with batch norm and ReLU. The split is between them. Feature maps are flattened first. The paper uses
    dim = 2048.
    """
    width = math.prod(model.feature_shape)
    layers = [*hidden_layer(width, dim), *hidden_layer(dim, dim), *hidden_layer(dim, dim)]
    layers.pop()  # the last ReLU
    features = nn.Sequential(model.features, nn.Flatten(), nn.Sequential(*layers))
    predictor = nn.Sequential(*hidden_layer(dim, 512), nn.Linear(512, num_classes))
    projected = SplitModel(features, predictor)
    projected.feature_shape = (dim,)
    return projected


def build_model(
    name: str,
    options: Mapping[str, Any],
    shape: tuple[int, ...],
    num_classes: int,
    dtype: torch.dtype = torch.float32,
    *,
    layout: Layout | None = None,
    prepare: Callable[[nn.Module, tuple[int, ...], torch.dtype], Any] = ensure_split,
) -> Any:
    """Create the network called `name`.

    Initial weights are drawn from torch's global generator.

    Args:
        name: A key of `MODELS` or a user's `module:Name`: a dataclass of options with `build(shape, num_classes)`, or
            an `nn.Module` class or a function called with (shape, num_classes, **options); shape is a dict or a tuple
            of shapes where inputs have several parts.
        layout: The parts of an input, if it has several.
        prepare: Returns a user's model as methods use it, by default with its split point. rayfed's own have theirs.

    Raises:
        UsageError: The name or an option is unknown, or the network cannot take such inputs.
    """
    create, projection = _factory(name, options)
    is_own = isinstance(getattr(create, "__self__", None), ModelOptions)
    if layout is not None and is_own:
        raise UsageError(f"model.name={name}: takes one input, and these have {layout}; give a model of your own")
    if layout is None:
        shapes = tuple(shape)
    else:
        shapes = layout.shapes()
    try:
        module = create(shapes, num_classes)
    except UsageError:
        raise
    except Exception as error:  # of the user's code, or of a network that does not fit into memory
        raise UsageError(f"model.name={name}: cannot be made: {error_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"model.name={name}: must create an nn.Module, got {type(module).__name__}")
    initialise_lazy_layers(module, shape, dtype, layout)
    if layout is not None:
        layout.attach(module)
    is_split = isinstance(module, SplitModel) and bool(module.feature_shape)
    if projection is None:
        if is_split:
            return module
        return prepare(module, shape, dtype)
    split: Any = module
    if not is_split:
        split = ensure_split(module, shape, dtype)
    return with_projection(split, projection, num_classes)


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if `build_model` would refuse `name` or `options`, without creating the network."""
    _factory(name, options)


def _factory(name: str, options: Mapping[str, Any]) -> tuple[Callable[[Any, int], Any], int | None]:
    """Return a function (shape, num_classes) -> network, and the width of the projection that is still to be added."""
    target = resolve(name, MODELS, where="model.name")
    own = dict(options)
    for key in ("head", "weights"):
        own.pop(key, None)
    if inspect.isclass(target) and dataclasses.is_dataclass(target) and hasattr(target, "build"):
        model_options: Any = build(target, own, where="model")
        return model_options.build, None
    arguments = arguments_for(target, own)
    given = arguments.pop("projection", None)
    projection = checked(given, int | None, {"low": 1}, where="model.projection")
    try:
        inspect.signature(target).bind((), 0, **arguments)
    except TypeError as error:
        raise UsageError(f"model.name={name}: is called with (shape, num_classes, **options): {error}") from error

    def create(shape: Any, num_classes: int) -> Any:
        return target(shape, num_classes, **arguments)

    return create, projection
