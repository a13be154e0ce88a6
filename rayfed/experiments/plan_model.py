"""The model of a plan, with the weights that follow from the seed, split into features and a head if need be."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import nn

from rayfed.core.errors import UsageError, one_line
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import copied, make_picklable
from rayfed.core.options import checked
from rayfed.core.paths import expanded
from rayfed.core.rng import global_generators_seeded
from rayfed.data.population import Population
from rayfed.experiments.config import Config
from rayfed.experiments.first_examples import input_type
from rayfed.losses.base import Loss, needed_outputs
from rayfed.metrics.base import OfRepresentations
from rayfed.models.base import build_model
from rayfed.models.split_model import check_whole, ensure_split, has_lazy_layers, initialise_lazy_layers

ModelFactory = Callable[[], nn.Module]


class UsersModel(NamedTuple):
    """A model as its user wrote it, beside the form in which the engine trains it.

    Attributes:
        make: Returns the user's module: the given instance itself, or a new one.
        names: The user's name of each weight of the engine's module, which may be split.
    """

    make: Callable[[], nn.Module]
    names: Mapping[str, str]

    @classmethod
    def of(cls, module: nn.Module) -> "UsersModel":
        """Return a module of rayfed's own: its user and the engine have the same names for its weights."""
        return cls(partial(copied, module), renamed(names_by_id(module), module))


def model_of(
    config: Config, population: Population, model: ModelFactory | nn.Module | None, loss: Loss
) -> tuple[nn.Module, UsersModel]:
    """Build the model with the weights that follow from the seed, split into features and head where that is needed.

    It is returned with what the user gave or named, for comparison.
    """
    if model is None:
        return _named_model(config, population, loss)
    dtype = input_type(population)
    layout = population.layout

    def users() -> nn.Module:
        with global_generators_seeded(config.seed, "model"):
            return _users_module(model, population.shape, dtype, layout)

    with global_generators_seeded(config.seed, "model"):
        given = fresh_module(model, population.shape, dtype, layout)
    _load_weights(given, config)
    if layout is not None:
        layout.attach(given)
    before = names_by_id(given)
    built = prepared(config, given, population.shape, dtype)
    make_picklable(built)
    return built, UsersModel(users, renamed(before, built))


def _named_model(config: Config, population: Population, loss: Loss) -> tuple[nn.Module, UsersModel]:
    """Build the model that `config` names; see `model_of`."""
    name = config.model.name or ""
    options = config.model.options
    dtype = input_type(population)
    layout = population.layout
    shape = population.shape
    outputs = needed_outputs(loss, population.clients[0].train.y.shape[1:], population.num_classes)
    before: dict[int, str] = {}

    def remembered(module: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> nn.Module:
        before.update(names_by_id(module))
        return prepared(config, module, shape, dtype)

    def users() -> nn.Module:
        with global_generators_seeded(config.seed, "model"):
            module: nn.Module = build_model(
                name, options, shape, outputs, dtype, layout=layout, prepare=lambda module, shape, dtype: module
            )
        return module

    with global_generators_seeded(config.seed, "model"):
        built: nn.Module = build_model(name, options, shape, outputs, dtype, layout=layout, prepare=remembered)
    _load_weights(built, config)
    make_picklable(built)
    return built, UsersModel(users, renamed(before or names_by_id(built), built))


def names_by_id(module: nn.Module) -> dict[int, str]:
    """Return the names of the parameters and buffers of `module` by their `id`; tied ones have their first name."""
    names = {}
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        names[id(value)] = name
    return names


def renamed(before: Mapping[int, str], module: nn.Module) -> dict[str, str]:
    """Return the name that each tensor of `module` had before it was split, by its present name."""
    return {name: before[key] for key, name in names_by_id(module).items() if key in before}


def _load_weights(module: nn.Module, config: Config) -> None:
    """Give `module` the weights in `model.weights`, the folder that `Result.save` wrote or a file in it."""
    given: Any = checked(config.model.options.get("weights"), str | None, {}, where="model.weights")
    if given is None:
        return
    path = expanded(given)
    if path.is_dir():
        path = path / "model.safetensors"
    try:
        load_model(module, path)
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
    key = _needs_split(config)
    if key is None:
        return module
    try:
        return ensure_split(module, shape, dtype, head=head)
    except UsageError as error:
        raise UsageError(f"{key}: needs a model that is split into features and a head; {error}") from error


def _needs_split(config: Config) -> str | None:
    """Return the first key of `config` that needs a model split into features and a head; None if none does."""
    if config.algorithm.traits.needs_split:
        return f"algorithm.name={config.algorithm_name}"
    for name, metric in config.metrics.items():
        if isinstance(metric, OfRepresentations) and {"features", "head"}.intersection(metric.layers):
            return f"metrics.{name}"
    return None


def fresh_module(
    model: ModelFactory | nn.Module,
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    layout: Layout | None = None,
) -> nn.Module:
    """Return the user's module on the CPU, newly made or copied, because splitting changes a model.

    Args:
        model: The module, or a function that makes it.
        shape: Shape of one input, by which lazy layers get their weights.
        dtype: Type of the inputs.
        layout: The parts of an input, if it has several.

    Raises:
        UsageError: There is no module, or it cannot be copied.
    """
    module = _users_module(model, shape, dtype, layout)
    try:
        return copied(module).cpu()  # each process moves its own copy to its device
    except Exception as error:  # an attribute may raise anything
        raise UsageError(f"model: {_uncopied(module)} cannot be copied to its clients ({one_line(error)})") from error


def _users_module(
    model: ModelFactory | nn.Module, shape: tuple[int, ...], dtype: torch.dtype, layout: Layout | None
) -> nn.Module:
    """Return the user's own module, or a new one; of a module with lazy layers a copy, in which they have weights."""
    if not isinstance(model, nn.Module):
        module = _made(model)
        initialise_lazy_layers(module, shape, dtype, layout)
        return module
    if not has_lazy_layers(model):
        return model
    module = copied(model)
    initialise_lazy_layers(module, shape, dtype, layout)
    return module


def _uncopied(module: nn.Module) -> str:
    """Return which attribute of `module` prevents a copy, and what kind of object it is."""
    for path, layer in module.named_modules():
        for name, value in vars(layer).items():
            try:
                copy.deepcopy(value)
            except Exception:  # as above
                if isinstance(value, dict):
                    continue
                full_name = f"{path}.{name}".lstrip(".")
                return f"its attribute {full_name} ({type(value).__name__})"
    return "it"


def _made(model: ModelFactory) -> nn.Module:
    """Return the module that a function makes, or raise UsageError."""
    module: Any = model
    got = ""
    if callable(model):
        module = model()
        got = "a function that returns "
    if isinstance(module, nn.Module):
        return module
    got += type(module).__name__
    if isinstance(model, str):
        got += f"; to choose one by name, write model.name={model}"
    raise UsageError(f"model: expected a torch.nn.Module, or a function without arguments that makes one; got {got}")
