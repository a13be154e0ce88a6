"""Creation of models by name: a model of rayfed's or a user's `module:Class`."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout
from rayfed.core.options import build, checked
from rayfed.core.registry import resolve
from rayfed.models import MODELS
from rayfed.models.base import ModelOptions, with_projection
from rayfed.models.split_model import SplitModel, ensure_split, initialise_lazy_layers


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
    if layout is not None and isinstance(getattr(create, "__self__", None), ModelOptions):
        raise UsageError(f"model.name={name}: takes one input, and these have {layout}; give a model of your own")
    module = create(layout.shapes() if layout else tuple(shape), num_classes)
    if not isinstance(module, nn.Module):
        raise UsageError(f"model.name={name}: must create an nn.Module, got {type(module).__name__}")
    initialise_lazy_layers(module, shape, dtype, layout)
    if layout is not None:
        layout.attach(module)
    if isinstance(module, SplitModel) and module.feature_shape:
        model = module
    else:
        model = (prepare if projection is None else ensure_split)(module, shape, dtype)
    return model if projection is None else with_projection(model, projection, num_classes)


def check_model(name: str, options: Mapping[str, Any]) -> None:
    """Raise a `UsageError` if `build_model` would refuse `name` or `options`, without creating the network."""
    _factory(name, options)


def _factory(name: str, options: Mapping[str, Any]) -> tuple[Callable[[tuple[int, ...], int], Any], int | None]:
    """Return a function (shape, num_classes) -> network, and the width of the projection that is still to be added."""
    target = resolve(name, MODELS, where="model.name")
    options = {key: value for key, value in options.items() if key not in ("head", "weights")}
    if inspect.isclass(target) and dataclasses.is_dataclass(target) and hasattr(target, "build"):
        model_options: Any = build(target, options, where="model")
        return model_options.build, None
    arguments = dict(options)
    projection = checked(arguments.pop("projection", None), int | None, {"low": 1}, where="model.projection")
    try:
        inspect.signature(target).bind((), 0, **arguments)
    except TypeError as error:
        raise UsageError(f"model.name={name}: is called with (shape, num_classes, **options): {error}") from error
    return (lambda shape, num_classes: target(shape, num_classes, **arguments)), projection
