"""The model of a plan: chosen by name, or the user's own, with the weights that follow from the seed."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import copied, make_picklable
from rayfed.core.options import checked
from rayfed.core.rng import global_generators_seeded
from rayfed.data.population import Population
from rayfed.experiments.config import Config
from rayfed.losses.base import Loss, needed_outputs
from rayfed.metrics.base import OfRepresentations
from rayfed.models.base import build_model
from rayfed.models.split_model import check_whole, ensure_split, initialise_lazy_layers
from rayfed.records.storage import one_line

ModelFactory = Callable[[], nn.Module]


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0]).dtype
    return torch.float32 if dtype == torch.uint8 else dtype


def model_of(config: Config, population: Population, model: ModelFactory | nn.Module | None, loss: Loss) -> nn.Module:
    """Build the model with the weights that follow from the seed, split into features and head where that is needed."""
    dtype, layout = input_type(population), population.layout
    outputs = needed_outputs(loss, population.clients[0].train.y.shape[1:], population.num_classes)
    with global_generators_seeded(config.seed, "model"):
        if model is None:
            name, options = config.model.name or "", config.model.options
            prepare = partial(prepared, config)
            shape = population.shape
            built: nn.Module = build_model(name, options, shape, outputs, dtype, layout=layout, prepare=prepare)
            _refuse_gradient_hooks(built)
            _load_weights(built, config)
        else:
            given = fresh_module(model, population.shape, dtype, layout)
            _load_weights(given, config)
            if layout is not None:
                layout.attach(given)
            built = prepared(config, given, population.shape, dtype)
            _refuse_hooks_of_whole(given, built)
    make_picklable(built)
    return built


def _load_weights(module: nn.Module, config: Config) -> None:
    """Give `module` the weights in `model.weights`, the folder that `Result.save` wrote or a file in it."""
    given: Any = checked(config.model.options.get("weights"), str | None, {}, where="model.weights")
    if given is None:
        return
    path = Path(given).expanduser()
    try:
        load_model(module, path / "model.safetensors" if path.is_dir() else path)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UsageError(
            f"model.weights={given}: {one_line(error)}; give what Result.save wrote of the same model"
        ) from error


def prepared(config: Config, module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
    """Return the user's model as the algorithm and the metrics of `config` use it: split if they need that, or whole.

    Raises:
        UsageError: The model cannot take such inputs, or it has no split where one is needed.
    """
    if getattr(module, "feature_shape", ()) and layout_of(module) is None:
        return module
    check_whole(module, shape, dtype)
    head: Any = checked(config.model.options.get("head"), str | None, {}, where="model.head")
    needing = [f"algorithm.name={config.algorithm_name}"] if config.algorithm.needs_split else []
    needing += [
        f"metrics.{name}"
        for name, metric in config.metrics.items()
        if isinstance(metric, OfRepresentations) and {"features", "head"}.intersection(metric.layers)
    ]
    if not needing:
        return module
    try:
        return ensure_split(module, shape, dtype, head=head)
    except UsageError as error:
        raise UsageError(f"{needing[0]}: needs a model that is split into features and a head; {error}") from error


def fresh_module(
    model: ModelFactory | nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> nn.Module:
    """Return the user's module on the CPU, newly made or copied, because splitting changes a model.

    Args:
        model: The module, or a function that makes it.
        shape: Shape of one input, by which lazy layers of a new module get their weights.
        dtype: Type of the inputs.
        layout: The parts of an input, if it has several.

    Raises:
        UsageError: There is no module.
    """
    module = model if isinstance(model, nn.Module) else _made(model)
    if module is not model:
        initialise_lazy_layers(module, shape, dtype, layout)
    _refuse_gradient_hooks(module)
    return copied(module).cpu()  # each process moves its own copy to its device


def _refuse_gradient_hooks(module: nn.Module) -> None:
    """Raise UsageError for hooks of parameters, because every client trains weights of its own without these hooks."""
    for name, value in module.named_parameters():
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise UsageError(
                f"model: {name} has a gradient hook, which is not called in training; to freeze weights set "
                "requires_grad=False, and to change gradients use register_full_backward_hook of a layer"
            )


def _refuse_hooks_of_whole(given: nn.Module, split: nn.Module) -> None:
    """Raise UsageError for hooks of a model whose features and head are called separately."""
    kinds = (given._forward_hooks, given._forward_pre_hooks, given._backward_hooks, given._backward_pre_hooks)
    hooks = [hook for kind in kinds for hook in kind.values() if not isinstance(hook, Layout)]
    if hooks and hasattr(split, "feature_shape") and getattr(split, "head", None) is not given:
        raise UsageError(
            "model: a hook of the whole model is not called in training, which runs features and head; register it on "
            "a layer of the model"
        )


def _made(model: ModelFactory) -> nn.Module:
    """Return the module that a function makes, or raise UsageError."""
    module = model() if callable(model) else model
    if isinstance(module, nn.Module):
        return module
    named = f"; to choose one by name, write model.name={model}" if isinstance(model, str) else ""
    raise UsageError(
        "model: expected a torch.nn.Module, or a function without arguments that makes one; got "
        f"{'a function that returns ' * callable(model)}{type(module).__name__}{named}"
    )
