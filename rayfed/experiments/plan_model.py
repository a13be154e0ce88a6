"""The model and the loss of a plan: the model is made, and both are tried on a few examples before anything starts."""

import contextlib
import copy
import inspect
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.errors import UsageError, error_line, is_user_file, one_line
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import copied, make_picklable
from rayfed.core.options import checked
from rayfed.core.outputs import UNKNOWN, are_survival, meaning_of_outputs
from rayfed.core.paths import expanded
from rayfed.core.rng import global_generators_seeded, global_state_kept
from rayfed.core.task import Batch, is_known_loss, loss_on
from rayfed.data.population import Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.config import Config
from rayfed.losses.base import CrossEntropy, Loss, NamedLoss, needed_outputs
from rayfed.losses.survival import Cox
from rayfed.metrics.base import OfRepresentations
from rayfed.models.base import build_model
from rayfed.models.remedies import is_one_hot, reason_of_loss, remedy_for_inputs
from rayfed.models.split_model import check_whole, ensure_split, has_lazy_layers, initialise_lazy_layers

ModelFactory = Callable[[], nn.Module]

_TRIED = 8  # examples at most of the step that is tried
_IN_TURN = 4  # examples at most of each of the two steps that are taken in both orders


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0].copy()).dtype  # it may be read-only
    if dtype == torch.uint8:
        return torch.float32
    return dtype


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
        """Return a module of rayfed's own, whose weights have one name."""
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


def dry_step(blueprint: Blueprint, population: Population, loss: Loss, *, model: str, own_model: bool) -> Blueprint:
    """Return `blueprint` with what its outputs stand for, after trying its model and its loss on the data.

    Args:
        blueprint: The simulation.
        population: The data.
        loss: The loss that scores models.
        model: The key of the model.
        own_model: Whether the model is the user's own. A model of rayfed's took images of this shape when it was made.

    Raises:
        UsageError: One of them does not go with the data; the message names its key.
    """
    if own_model or population.clients[0].train.dtype not in (np.uint8, np.float32):
        _check_model(blueprint, population, model, loss)
    if own_model:
        blueprint = replace(blueprint, rows_interact=_rows_interact(blueprint, population))
    labels = population.clients[0].train.y
    if isinstance(loss, NamedLoss):
        for part in population.examples():
            loss.check_labels(population.name, part.y)
    if isinstance(loss, CrossEntropy):
        _refuse_numbers(population, labels)
    if labels.ndim == 1 and not own_model and isinstance(getattr(blueprint.model, "head", None), nn.Conv2d):
        raise UsageError(f"{model}: gives every pixel a class, and needs masks, of which {population.name} has none")
    if loss != CrossEntropy() or labels.ndim != 1:
        blueprint = checked_loss(blueprint, population)
    if blueprint.outputs.kind == "survival" and not any(events_of_clients(population)):
        where = f"loss: no client of {population.name}"
        raise UsageError(f"{where} has an event in its training data, so nothing is learnt")
    if isinstance(loss, Cox) and blueprint.batch_size == 1:
        raise UsageError(
            "local.batch_size=1: loss.name=cox compares the examples of a batch with each other, so nothing is learnt "
            "from one; give at least 2, better as many as have several events"
        )
    if own_model:
        _check_outputs(blueprint, population, model)
    return blueprint


def _refuse_numbers(population: Population, labels: np.ndarray) -> None:
    """Raise UsageError if the labels are no classes, which cross-entropy takes."""
    if labels.dtype.kind != "f":
        return
    if are_survival([labels]):
        remedy = "loss.name=cox takes an event and a time, as these seem to be"
    elif is_one_hot(labels):
        remedy = "these are one-hot, so give their classes, y.argmax(1), or use bce_with_logits zeros and ones"
    else:
        remedy = "loss.name=mse takes numbers, bce_with_logits zeros and ones"
    raise UsageError(
        f"loss.name=cross_entropy: takes classes, integers from 0, and the labels of {population.name} are "
        f"{labels.dtype}, such as {labels.flat[0]:g}; {remedy}"
    )


def events_of_clients(population: Population) -> list[int]:
    """Return the number of events, labels [event, time], in the training data of each participant."""
    return [int(client.train.y[:, 0].sum()) for client in population.participants]


def _rows_interact(blueprint: Blueprint, population: Population) -> bool:
    """Return whether an example's output depends on its batch, as by batch norm without statistics."""
    x, _ = first_batch(population.clients[0].train, 3)
    with global_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        first = task.predict(task.initial_weights(), x[[0, 0]])[0]
        other = task.predict(task.initial_weights(), x[[0, -1]])[0]
    return not torch.allclose(first, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def _check_outputs(blueprint: Blueprint, population: Population, where: str) -> None:
    """Raise UsageError if the model returns a tensor in evaluation mode, and something else in training mode."""
    x, _ = first_batch(largest_part(population), _TRIED)

    def outputs(model: Any) -> Any:
        if not task.feature_shape:
            return model(x)
        features = model.features(x)
        if not isinstance(features, Tensor):
            return features
        return model.head(features)

    with global_state_kept(), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        task = blueprint.context(population, "cpu").task
        weights = task.initial_weights()
        evaluated = task.model.run(weights, outputs, train=False)[0]
        if not isinstance(evaluated, Tensor):
            return
        try:
            returned = task.model.run(weights, outputs, train=True)[0]
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"{where}: a training step fails: {error_line(error)}") from error
    if isinstance(returned, Tensor):
        return
    layer: Any = task.model.module
    if task.feature_shape:
        layer = layer.features
    raise UsageError(
        f"{where}: returns {type(returned).__name__} in training mode, and must return one tensor of logits, as in "
        f"evaluation mode{_place_of(layer)}"
    )


def _place_of(layer: Any) -> str:
    """Return in brackets where the user's code of a layer or a method is; empty for code of others."""
    function = layer
    if not inspect.ismethod(layer):
        function = type(layer).forward
    code = function.__code__
    if not is_user_file(code.co_filename):
        return ""
    return f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})"


def _check_model(blueprint: Blueprint, population: Population, where: str, loss: Loss) -> None:
    """Raise UsageError if the model fails on the data, or has fewer outputs than cross-entropy needs.

    Integers stand for words or categories, and only the model knows which embedding gets which of them. So it runs on
    the examples with the smallest and the largest integer at each position.
    """
    is_integer = not input_type(population).is_floating_point
    inputs = population.clients[0].train.x[:2]
    if is_integer:
        inputs = extreme_examples(population)
    with global_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        for start in range(0, len(inputs), 64):
            x = torch.from_numpy(inputs[start : start + 64].copy())
            if x.dtype == torch.uint8:
                x = x.float()
            try:
                outputs = task.predict(task.initial_weights(), x)
            except (RuntimeError, IndexError) as error:
                reason = _reason_of_inputs(blueprint, population, inputs, error, is_integer=is_integer)
                raise UsageError(f"{where}: fails on inputs of {population.name}, {reason}") from error
    classes = population.num_classes
    if isinstance(loss, CrossEntropy) and outputs.shape[1] < classes:
        raise UsageError(f"{where}: gives {outputs.shape[1]} logits, but there are {classes} classes")


def _reason_of_inputs(
    blueprint: Blueprint, population: Population, inputs: np.ndarray, error: Exception, *, is_integer: bool
) -> str:
    """Return what kind of inputs the model failed on with `error`, and what would help."""
    numbers = inputs
    if population.layout:
        numbers = population.layout.integers(inputs)
    span = ""
    if is_integer and numbers.size:
        span = f", from {numbers.min()} to {numbers.max()}"
    fitting = None
    if numbers.size:
        fitting = remedy_for_inputs(blueprint.model, torch.from_numpy(numbers))
    remedy = fitting or "give them as float32, or choose another model"
    kind = population.layout or population.clients[0].train.dtype
    return f"which are {kind}{span} ({one_line(error)}); {remedy}"


def checked_loss(blueprint: Blueprint, population: Population) -> Blueprint:
    """Return `blueprint` with what its outputs stand for by the user's loss.

    Raises:
        UsageError: The loss does not return one scalar for a batch that its outputs determine.
    """
    loss = loss_on("cpu", blueprint.loss)  # its buffers may change

    def on_copies(outputs: Tensor, y: Tensor) -> Tensor:
        return loss(outputs.clone(), y.clone())  # as in training: it may change them in place

    outputs, labels = first_outputs(blueprint, population, 2)
    value = _tried_loss(loss, on_copies, outputs, labels)
    if not isinstance(value, Tensor):
        raise _no_mean(type(value).__name__)
    if value.ndim:
        raise _no_mean(f"a tensor of shape {tuple(value.shape)}")
    _refuse_sums(on_copies, outputs.detach(), labels)
    if labels.ndim == 1 and outputs.shape[1:] == (1,):
        _check_pairs(on_copies, population)
    every_label = [part.y for part in population.examples()]
    with global_state_kept(), torch.no_grad():
        meaning = meaning_of_outputs(_recognisable(loss, on_copies), outputs.shape[1:], every_label)
        if meaning == UNKNOWN and isinstance(loss, nn.Module):
            for parameter in loss.parameters():  # drawn parameters, such as centres of classes, hide the meaning
                parameter.zero_()
            meaning = meaning_of_outputs(_recognisable(loss, on_copies), outputs.shape[1:], every_label)
        return replace(blueprint, outputs=meaning)


def _tried_loss(loss: Loss, on_copies: Loss, outputs: Tensor, labels: Tensor) -> Any:
    """Return what a loss returns for `outputs` and `labels`, or raise UsageError if it fails on them."""
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            return on_copies(outputs.requires_grad_(), labels)
        except UserWarning as error:
            raise _mismatch(outputs, labels) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            reason = reason_of_loss(loss, outputs, labels)
            if reason:
                raise UsageError(f"loss: {reason}") from error
            raise UsageError(
                f"loss: fails on outputs {_form(outputs)} and labels {_form(labels)}: {error_line(error)}"
            ) from error


def _form(values: Tensor) -> str:
    return f"{values.dtype} {list(values.shape)}"


def _no_mean(got: str) -> UsageError:
    return UsageError(f'loss: must return the mean over the batch, a scalar tensor, not {got}; use reduction="mean"')


def _recognisable(loss: Loss, on_copies: Loss) -> Loss:
    """Return the loss by which the meaning of outputs is found: known ones and their options are recognised by name."""
    function: Any = loss
    if isinstance(loss, partial):
        function = loss.func
    if is_known_loss(loss) or hasattr(function, "ignore_index"):
        return loss
    return on_copies


def _refuse_sums(loss: Loss, outputs: Tensor, labels: Tensor) -> None:
    """Raise UsageError if a loss grows by the same amount with each further copy of a batch: it sums over examples."""
    noise = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(0))
    drawn = outputs + noise.to(outputs.dtype)
    values = []
    with contextlib.suppress(Exception), torch.no_grad():  # of losses that take batches of one size
        for copies in (1, 2, 3):
            value = loss(torch.cat([drawn] * copies), torch.cat([labels] * copies))
            values.append(float(value))
    if len(values) < 3:
        return
    first, second, third = values
    grows = abs(second - first) > 1e-3 * max(abs(first), 1e-6)
    if grows and math.isclose(third - second, second - first, rel_tol=1e-3):
        raise UsageError(
            f"loss: sums over the batch: it is {first:.4g} for some examples, and {second:.4g} for each of them twice; "
            'return the mean over the batch, as torch\'s losses do with reduction="mean"'
        )


def _check_pairs(loss: Loss, population: Population) -> None:
    """Raise UsageError if a loss of outputs [n, 1] and labels [n] does not compare each output with its own label.

    Torch broadcasts their difference to [n, n], whose mean depends on the labels, but not on their order.
    """
    labels = np.concatenate([part.y for part in population.examples()])
    others = np.flatnonzero(labels != labels[0])
    if not others.size:
        return
    y = torch.from_numpy(labels[[0, others[0]]])
    outputs = y.float()[:, None]
    with torch.no_grad():
        in_order = float(loss(outputs, y))
        turned = float(loss(outputs, y.flip(0)))
        of_first = float(loss(outputs[[0, 0]], y[[0, 0]]))
        of_second = float(loss(outputs[[0, 0]], y[[1, 1]]))
    ignores_order = math.isclose(in_order, turned, rel_tol=1e-5)
    if ignores_order and not math.isclose(of_first, of_second, rel_tol=1e-5):
        raise _mismatch(outputs, y)


def _mismatch(outputs: Tensor, labels: Tensor) -> UsageError:
    shapes = f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}"
    return UsageError(
        f"loss: got {shapes}, which it compares all with all; give labels of the same shape as the outputs, such as "
        "y[:, None]"
    )


def first_outputs(blueprint: Blueprint, population: Population, count: int) -> tuple[Tensor, Tensor]:
    """Return the logits of the initial model for the first `count` examples, and their labels."""
    x, y = first_batch(population.clients[0].train, count)
    with global_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        return task.predict(task.initial_weights(), x), y


def refuse_mixing(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if the algorithm takes means of labels and the loss does not take them, or ignores a label."""
    if not blueprint.algorithm.traits.mixes_labels:
        return
    where = f"algorithm.name={blueprint.algorithm.name}: mixes labels, and"
    ignored = blueprint.outputs.ignored
    if ignored is not None:
        raise UsageError(f"{where} {ignored} stands for no class; use a method without mixtures")
    if blueprint.outputs.kind == "survival":
        raise UsageError(f"{where} an event and a time have no mean; use a method without mixtures")
    outputs, y = first_outputs(blueprint, population, 3)
    task = blueprint.context(population, "cpu").task
    mixed = soft(y, task)
    try:
        value = float(task.loss(outputs.float(), mixed, task.initial_weights()))
        expected = float(task.loss(outputs.float(), y, task.initial_weights()))
    except Exception as error:  # the user's loss may raise anything
        raise UsageError(f"{where} the loss fails on labels {[*mixed.shape]}: {error_line(error)}") from error
    if _weighs_classes(blueprint.loss):  # its means are over weights, too
        return
    if not math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-6):
        raise UsageError(f"{where} the loss of unmixed ones is {value:.4g} as probabilities, not {expected:.4g}")


def _weighs_classes(loss: Loss) -> bool:
    if "weight" in getattr(loss, "keywords", {}):
        return True
    return getattr(loss, "weight", None) is not None


def largest_part(population: Population) -> Examples:
    """Return the training examples of the client with the most."""
    return population.clients[int(population.clients.train_sizes().argmax())].train


def first_batch(part: Examples, count: int) -> Batch:
    """Return the first `count` examples of a part in the type in which they reach the model; pixels stay 0 to 255."""
    x = torch.from_numpy(part.x[:count].copy())
    y = torch.from_numpy(part.y[:count].copy())
    if x.dtype == torch.uint8:
        x = x.float()
    return Batch(x, y)


def extreme_examples(population: Population) -> np.ndarray:
    """Return the examples with the smallest and the largest input at each position, those of test sets included."""
    extremes = np.zeros((0, *population.shape), population.clients[0].train.dtype)
    for part in population.examples():
        for block in part.blocks():
            extremes = _extremes_of(np.concatenate([extremes, block]), population.layout)
    return extremes


def _extremes_of(candidates: np.ndarray, layout: Layout | None) -> np.ndarray:
    """Return those of some examples that have the smallest or the largest input at a position."""
    if layout:
        flat = layout.integers(candidates)
    else:
        flat = candidates.reshape(len(candidates), -1)
    if not flat.size:
        return candidates[:2]
    chosen = np.unique([flat.argmin(0), flat.argmax(0)])
    extremes: np.ndarray = candidates[chosen]
    return extremes
