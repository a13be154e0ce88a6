"""The model and the loss of a plan: the model is made, and both are tried on a few examples before anything starts."""

import contextlib
import copy
import inspect
import math
import types
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_model
from torch import Tensor, nn

from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.errors import UsageError, error_line, is_user_file
from rayfed.core.layout import Layout, layout_of
from rayfed.core.modules import copied, make_picklable
from rayfed.core.network import vectorised
from rayfed.core.options import checked
from rayfed.core.outputs import UNKNOWN, meaning_of_outputs
from rayfed.core.paths import expanded
from rayfed.core.rng import global_generators_seeded, torch_state_kept
from rayfed.core.task import Batch, Task, loss_on
from rayfed.core.trees import Weights, clone, only, stack
from rayfed.data.population import Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.config import Config
from rayfed.experiments.user_code import object_hash
from rayfed.losses.base import CrossEntropy, Loss, NamedLoss, needed_outputs
from rayfed.metrics.base import OfRepresentations
from rayfed.models.base import build_model
from rayfed.models.remedies import is_one_hot, reason_of_loss, remedy_for_inputs
from rayfed.models.split_model import SplitModel, check_whole, ensure_split, initialise_lazy_layers
from rayfed.records.storage import one_line

ModelFactory = Callable[[], nn.Module]

_TRIED = 8  # examples at most of the step that is tried
_IN_TURN = 4  # examples at most of each of the two steps that are taken in both orders
_TORCHS = frozenset(vars(nn.Module()))  # attributes


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0].copy()).dtype  # it may be read-only
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
    path = expanded(given)
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
    needing = [f"algorithm.name={config.algorithm_name}"] if config.algorithm.traits.needs_split else []
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
    if isinstance(loss, CrossEntropy) and labels.dtype.kind == "f":
        remedy = "loss.name=mse takes numbers, bce_with_logits zeros and ones"
        if is_one_hot(labels):
            remedy = f"these are one-hot, so give their classes, y.argmax(1), or use {remedy.rpartition(', ')[2]}"
        raise UsageError(
            f"loss.name=cross_entropy: takes classes, integers from 0, and the labels of {population.name} are "
            f"{labels.dtype}, such as {labels.flat[0]:g}; {remedy}"
        )
    if labels.ndim == 1 and not own_model and isinstance(getattr(blueprint.model, "head", None), nn.Conv2d):
        raise UsageError(f"{model}: gives every pixel a class, and needs masks, of which {population.name} has none")
    of_classes = loss == CrossEntropy() and labels.ndim == 1
    blueprint = blueprint if of_classes else checked_loss(blueprint, population)
    together = (blueprint.vmap_clients or 1) > 1
    if own_model or together or not isinstance(loss, NamedLoss):
        _try_training(blueprint, population, model, together=together)
    return blueprint


def _try_training(blueprint: Blueprint, population: Population, where: str, *, together: bool) -> None:
    """Raise UsageError if the model cannot take a training step, or two clients cannot take it at once with vmap."""
    batch = first_batch(_largest_part(population), min(blueprint.batch_size, _TRIED))
    with torch_state_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself warns
        ctx = blueprint.context(population, "cpu")
        task, weights = ctx.task.without_loss_terms(), ctx.task.initial_weights()
        if not task.trainable:  # which `Blueprint.check` refuses
            return
        try:
            _check_outputs(task, weights, batch.x, where)
            grads, _, _ = task.gradients(weights, batch)
            ctx.optimizer.update_(clone(weights), grads, ctx.optimizer.init(only(weights, task.trainable)))
        except UsageError:
            raise
        except Exception as error:  # the user's code may raise anything
            raise UsageError(f"{where}: a training step fails: {error_line(error)}") from error
        try:
            if together:
                with vectorised(), torch.autocast("cpu", torch.bfloat16, blueprint.bf16, cache_enabled=False):
                    step = torch.vmap(lambda *state: task.gradients(*state)[0], randomness="different")
                    step(stack([weights, weights]), stack([batch, batch]))
        except Exception as error:  # as above
            raise UsageError(
                f"placement.vmap_clients={blueprint.vmap_clients}: torch cannot vectorise a training step of {where}: "
                f"{error_line(error)}; use placement.vmap_clients=1, or auto"
            ) from error


def _rows_interact(blueprint: Blueprint, population: Population) -> bool:
    """Return whether an example's output depends on its batch, as by batch norm without statistics."""
    x, _ = first_batch(population.clients[0].train, 3)
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        first, other = (task.predict(task.initial_weights(), x[[0, row]])[0] for row in (0, -1))
    return not torch.allclose(first, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def _check_outputs(task: Task, weights: Weights, x: Tensor, where: str) -> None:
    """Raise UsageError if the model returns a tensor in evaluation mode, and something else in training mode."""

    def outputs(model: Any) -> Any:
        features = model.features(x) if task.feature_shape else model(x)
        return model.head(features) if task.feature_shape and isinstance(features, Tensor) else features

    with torch.no_grad():
        returned, evaluated = (task.model.run(weights, outputs, train=train)[0] for train in (True, False))
    if isinstance(returned, Tensor) or not isinstance(evaluated, Tensor):
        return
    layer: Any = task.model.module.features if task.feature_shape else task.model.module
    code = (layer if inspect.ismethod(layer) else type(layer).forward).__code__
    place = f" ({code.co_filename}, line {code.co_firstlineno}, in {code.co_name})"
    raise UsageError(
        f"{where}: returns {type(returned).__name__} in training mode, and must return one tensor of logits, as in "
        f"evaluation mode{place if is_user_file(code.co_filename) else ''}"
    )


def _check_model(blueprint: Blueprint, population: Population, where: str, loss: Loss) -> None:
    """Raise UsageError if the model fails on the data, or has fewer outputs than cross-entropy needs.

    Integers stand for words or categories, and only the model knows which embedding gets which of them. So it runs on
    the examples with the smallest and the largest integer at each position.
    """
    kind, is_integer = population.clients[0].train.dtype, not input_type(population).is_floating_point
    inputs = extreme_examples(population) if is_integer else population.clients[0].train.x[:2]
    numbers = population.layout.integers(inputs) if population.layout else inputs
    span = f", from {numbers.min()} to {numbers.max()}" if is_integer and numbers.size else ""
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        for start in range(0, len(inputs), 64):
            x = torch.from_numpy(inputs[start : start + 64].copy())
            try:
                outputs = task.predict(task.initial_weights(), x.float() if x.dtype == torch.uint8 else x)
            except (RuntimeError, IndexError) as error:
                fitting = remedy_for_inputs(blueprint.model, torch.from_numpy(numbers)) if numbers.size else ""
                remedy = fitting or "give them as float32, or choose another model"
                reason = f"which are {population.layout or kind}{span} ({one_line(error)}); {remedy}"
                raise UsageError(f"{where}: fails on inputs of {population.name}, {reason}") from error
    classes = population.num_classes
    if isinstance(loss, CrossEntropy) and outputs.shape[1] < classes:
        raise UsageError(f"{where}: gives {outputs.shape[1]} logits, but there are {classes} classes")


def checked_loss(blueprint: Blueprint, population: Population) -> Blueprint:
    """Return `blueprint` with what its outputs stand for by the user's loss.

    Raises:
        UsageError: The loss does not return one scalar for a batch that its outputs determine.
    """
    loss = loss_on("cpu", blueprint.loss)  # its buffers may change
    outputs, labels = first_outputs(blueprint, population, 2)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            value = loss(outputs.requires_grad_(), labels)
        except UserWarning as error:
            raise _mismatch(outputs, labels) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            if reason := reason_of_loss(loss, outputs, labels):
                raise UsageError(f"loss: {reason}") from error
            forms = [f"{values.dtype} {list(values.shape)}" for values in (outputs, labels)]
            raise UsageError(f"loss: fails on outputs {forms[0]} and labels {forms[1]}: {error_line(error)}") from error
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f'loss: must return the mean over the batch, a scalar tensor, not {got}; use reduction="mean"')
    if labels.ndim == 1 and outputs.shape[1:] == (1,):
        _check_pairs(loss, population)
    every_label = [part.y for part in population.examples()]
    with torch_state_kept(), torch.no_grad():
        meaning = meaning_of_outputs(loss, outputs.shape[1:], every_label)
        if meaning == UNKNOWN and isinstance(loss, nn.Module):
            for parameter in loss.parameters():  # drawn parameters, such as centres of classes, hide the meaning
                parameter.zero_()
            meaning = meaning_of_outputs(loss, outputs.shape[1:], every_label)
        return replace(blueprint, outputs=meaning)


def _check_pairs(loss: Loss, population: Population) -> None:
    """Raise UsageError if a loss of outputs [n, 1] and labels [n] does not compare each output with its own label.

    Torch broadcasts their difference to [n, n], whose mean depends on the labels, but not on their order.
    """
    labels = np.concatenate([part.y for part in population.examples()])
    if not (others := np.flatnonzero(labels != labels[0])).size:
        return
    y = torch.from_numpy(labels[[0, others[0]]])
    outputs, first, second = y.float()[:, None], y[[0, 0]], y[[1, 1]]
    with torch.no_grad():
        in_order, turned = float(loss(outputs, y)), float(loss(outputs, y.flip(0)))
        of_first, of_second = (float(loss(outputs[[0, 0]], given)) for given in (first, second))
    if math.isclose(in_order, turned, rel_tol=1e-5) and not math.isclose(of_first, of_second, rel_tol=1e-5):
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
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        return task.predict(task.initial_weights(), x), y


def refuse_mixing(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if the algorithm takes means of labels and the loss does not take them, or ignores a label."""
    if not blueprint.algorithm.traits.mixes_labels:
        return
    where, loss = f"algorithm.name={blueprint.algorithm.name}: mixes labels, and", blueprint.loss
    if (ignored := blueprint.outputs.ignored) is not None:
        raise UsageError(f"{where} {ignored} stands for no class; use a method without mixtures")
    outputs, y = first_outputs(blueprint, population, 3)
    mixed = soft(y, task := blueprint.context(population, "cpu").task)
    try:
        value, expected = (float(task.loss(outputs.float(), labels, task.initial_weights())) for labels in (mixed, y))
    except Exception as error:  # the user's loss may raise anything
        raise UsageError(f"{where} the loss fails on labels {[*mixed.shape]}: {error_line(error)}") from error
    weighted = "weight" in getattr(loss, "keywords", {}) or getattr(loss, "weight", None) is not None
    if not weighted and not math.isclose(value, expected, rel_tol=1e-3, abs_tol=1e-6):  # means are over weights, too
        raise UsageError(f"{where} the loss of unmixed ones is {value:.4g} as probabilities, not {expected:.4g}")


def _largest_part(population: Population) -> Examples:
    """Return the training examples of the client with the most."""
    return population.clients[int(population.clients.train_sizes().argmax())].train


def refuse_leaks(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if attributes of the model or of the loss depend on the training steps taken before.

    Such a state, a counter for example, would go from one client to the next on its host. Two copies take a step on two
    batches, in both orders. What a step leaves behind may depend on its batch, but not on the steps before.
    """
    part = _largest_part(population)
    size = min(_IN_TURN, len(part) // 2)
    if size < 2:
        return
    x, y = first_batch(part, 2 * size)
    batches = list(map(Batch, x.split(size), y.split(size)))
    seen: dict[int, dict[str, str]] = {}
    for order in ((0, 1), (1, 0)):
        loss = blueprint.training_loss or blueprint.loss
        with contextlib.suppress(Exception):  # of objects that cannot be copied; their state goes on
            loss = copy.deepcopy(loss)
        task = replace(blueprint, training_loss=loss).context(population, "cpu").task.without_loss_terms()
        module: nn.Module = task.model.module
        module = module.features if type(module) is SplitModel else module
        for number in order:
            with global_generators_seeded(0, "leaks"):
                try:
                    task.gradients(clone(task.initial_weights()), batches[number])
                except Exception:  # other checks say why
                    return
            facts = _facts("model", module) | _facts("loss", task._loss)
            before = seen.setdefault(number, facts)
            for name in before | facts:
                if before.get(name) != facts.get(name):
                    kind, _, attribute = name.partition(".")
                    raise UsageError(
                        f"{kind}: training changes {attribute or 'its state'}, which is no buffer of its state_dict "
                        "and would go from client to client; keep it by register_buffer in the model, or leave it out"
                    )


def _facts(kind: str, value: Any) -> dict[str, str]:
    """Return hashes of what can change about a model or a loss, by dotted names."""
    facts: dict[str, str] = {}
    for path, holder in value.named_modules() if isinstance(value, nn.Module) else [("", value)]:
        parts = {key: part for key, part in getattr(holder, "__dict__", {}).items() if key not in _TORCHS}
        parts |= getattr(holder, "_buffers", {})
        frozen = [(key, part) for key, part in getattr(holder, "_parameters", {}).items() if part is not None]
        parts |= {key: part._version for key, part in frozen if not part.requires_grad}
        if isinstance(holder, types.FunctionType):
            parts |= inspect.getclosurevars(holder).nonlocals
        facts |= {
            ".".join(filter(None, [kind, path, key])): object_hash(part, everywhere=True) for key, part in parts.items()
        }
    return facts if isinstance(value, nn.Module) else facts | {kind: object_hash(value, everywhere=True)}


def first_batch(part: Examples, count: int) -> Batch:
    """Return the first `count` examples of a part in the type in which they reach the model; pixels stay 0 to 255."""
    x, y = (torch.from_numpy(values[:count].copy()) for values in (part.x, part.y))
    return Batch(x.float() if x.dtype == torch.uint8 else x, y)


def extreme_examples(population: Population) -> np.ndarray:
    """Return the examples with the smallest and the largest input at each position, those of test sets included."""
    extremes, layout = np.zeros((0, *population.shape), population.clients[0].train.dtype), population.layout
    for block in (block for part in population.examples() for block in part.blocks()):
        candidates = np.concatenate([extremes, block])
        flat = layout.integers(candidates) if layout else candidates.reshape(len(candidates), -1)
        extremes = candidates[np.unique([flat.argmin(0), flat.argmax(0)])] if flat.size else candidates[:2]
    return extremes
