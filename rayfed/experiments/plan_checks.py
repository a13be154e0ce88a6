"""Checks of models, losses and augmentations on the data of a plan, before anything starts.

Those of the user's own are tried on a few examples, since what they take and return is known to nobody else.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.augment.base import Augment
from rayfed.core.errors import UsageError
from rayfed.core.outputs import meaning_of_outputs
from rayfed.core.registry import in_one_line
from rayfed.core.rng import torch_state_kept
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.losses.base import Loss
from rayfed.losses.torch_losses import CrossEntropy
from rayfed.records.storage import one_line


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0]).dtype
    return torch.float32 if dtype == torch.uint8 else dtype


def checked_on_data(
    blueprint: Blueprint, population: Population, loss: Loss, *, own_model: str | None, own_augment: str | None
) -> Blueprint:
    """Return `blueprint` with what its outputs stand for.

    Args:
        blueprint: The simulation, whose model, loss and augmentation are tried.
        population: The data.
        loss: The loss that scores models.
        own_model: The key of a model of the user's own; None for one of rayfed's.
        own_augment: The key of an augmentation of the user's own; None for one of rayfed's.

    Raises:
        UsageError: One of them does not go with the data; the message names its key.
    """
    if own_model:
        check_token_ids(blueprint, population, own_model)
    if own_augment and blueprint.augment is not None:
        check_augment(blueprint.augment, population, own_augment)
    check_input_type(blueprint, population)
    if own_model and isinstance(loss, CrossEntropy):
        check_logits(blueprint, population, own_model)
    return blueprint if loss == CrossEntropy() else checked_loss(blueprint, population)


def check_vocabulary(model: nn.Module, population: Population) -> None:
    """Raise UsageError if the embedding has no vector for some token of the data, that of the test sets included."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    if not sizes:
        return
    bounds = [(int(block.min()), int(block.max())) for block in _blocks(population)]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if lowest < 0:
        raise UsageError(f"{population.name}: has the token id {lowest}; token ids are integers from 0")
    if highest >= sizes[0]:
        raise UsageError(
            f"model.vocabulary={sizes[0]}: {population.name} has token ids up to {highest}; give at least "
            f"{highest + 1}, or a smaller data.vocabulary"
        )


def check_augment(augment: Augment, population: Population, where: str) -> None:
    """Raise UsageError if an augmentation of the user's own returns something else than a batch like the one given."""
    augment.check(population.shape, population.clients[0].train.x.dtype)
    x, _ = _first_examples(population, 8)
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    with torch_state_kept():
        augmented = augment(x.clone())
    if not isinstance(augmented, Tensor) or (augmented.shape, augmented.dtype) != (x.shape, x.dtype):
        got = type(augmented).__name__
        if isinstance(augmented, Tensor):
            got = f"a tensor of {augmented.dtype} {tuple(augmented.shape)}"
        raise UsageError(f"{where}: returned {got}; expected one like the batch, of {x.dtype} {tuple(x.shape)}")


def check_token_ids(blueprint: Blueprint, population: Population, where: str) -> None:
    """Raise UsageError if a model of the user's own has no embedding for some integers of the data.

    Which embedding gets which integers is known to the model alone, so it runs on the examples with the smallest and
    the largest integer at each position.
    """
    if population.clients[0].train.x.dtype.kind not in "iu" or input_type(population).is_floating_point:
        return
    extremes = np.zeros((0, *population.shape), population.clients[0].train.x.dtype)
    for block in _blocks(population):
        candidates = np.concatenate([extremes, block])
        flat = candidates.reshape(len(candidates), -1)
        extremes = candidates[np.unique([flat.argmin(0), flat.argmax(0)])]
    with torch_state_kept():
        task = blueprint.context(population, "cpu").task
        for start in range(0, len(extremes), 64):
            try:
                task.predict(task.initial_weights(), torch.from_numpy(extremes[start : start + 64]))
            except IndexError as error:
                raise UsageError(
                    f"{where}: fails on inputs of {population.name}, which are integers from {extremes.min()} to "
                    f"{extremes.max()} ({one_line(error)}); nn.Embedding(n, …) takes 0 to n - 1"
                ) from error


def check_input_type(blueprint: Blueprint, population: Population) -> None:
    """Raise UsageError if inputs reach the model in a type on which it cannot compute, such as float64."""
    kind = population.clients[0].train.x.dtype
    if kind in (np.uint8, np.float32):
        return
    try:
        first_outputs(blueprint, population, 1)
    except RuntimeError as error:
        raise UsageError(
            f"{population.name}: inputs are {kind}, which the model does not take ({one_line(error)}); give them as "
            "float32, or choose another model"
        ) from error


def check_logits(blueprint: Blueprint, population: Population, where: str) -> None:
    """Raise UsageError if the model has fewer logits than there are classes, which cross-entropy needs."""
    logits, _ = first_outputs(blueprint, population, 1)
    if logits.shape[1] < population.num_classes:
        raise UsageError(f"{where}: gives {logits.shape[1]} logits, but there are {population.num_classes} classes")


def checked_loss(blueprint: Blueprint, population: Population) -> Blueprint:
    """Return `blueprint` with what its outputs stand for by the user's loss.

    Raises:
        UsageError: The loss does not return one scalar for a batch that its outputs determine.
    """
    loss = blueprint.loss
    if isinstance(loss, type) or not callable(loss):
        name = loss.__name__ if isinstance(loss, type) else repr(loss)
        hint = f"; give an instance, {name}()" if isinstance(loss, type) else ""
        raise UsageError(f"loss: expected a function (outputs, labels) -> scalar, got {name}{hint}")
    outputs, labels = first_outputs(blueprint, population, 2)
    with warnings.catch_warnings(), torch.enable_grad():
        warnings.filterwarnings("error", message="Using a target size")
        try:
            value = loss(outputs.requires_grad_(), labels)
        except UserWarning as error:
            raise _mismatch(outputs, labels) from error
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            forms = [f"{values.dtype} {list(values.shape)}" for values in (outputs, labels)]
            raise UsageError(
                f"loss: fails on outputs {forms[0]} and labels {forms[1]}: {in_one_line(error)}"
            ) from error
    if not isinstance(value, Tensor) or value.ndim:
        got = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(f'loss: must return the mean over the batch, a scalar tensor, not {got}; use reduction="mean"')
    if not value.requires_grad:
        raise UsageError("loss: its value has no gradient; compute it from the outputs by operations of torch")
    if labels.ndim == 1 and outputs.shape[1:] == (1,):
        _check_pairs(loss, population)
    every_label = [part.y for part in population.examples()]
    with torch_state_kept():
        return replace(blueprint, outputs=meaning_of_outputs(loss, outputs.shape[1:], every_label))


def _check_pairs(loss: Loss, population: Population) -> None:
    """Raise UsageError if a loss of outputs [n, 1] and labels [n] does not compare each output with its own label.

    Torch broadcasts their difference to [n, n], whose mean depends on the labels, but not on their order.
    """
    labels = np.concatenate([client.train.y for client in population.clients])
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
    x, y = _first_examples(population, count)
    with torch_state_kept(), torch.no_grad():
        task = blueprint.context(population, "cpu").task
        return task.predict(task.initial_weights(), x.float() if x.dtype == torch.uint8 else x), y


def _first_examples(population: Population, count: int) -> tuple[Tensor, Tensor]:
    """Return the first `count` inputs and labels of the first client that has training examples."""
    part = next((client.train for client in population.clients if len(client.train)), population.clients[0].train)
    x, y = (torch.from_numpy(values[:count].copy()) for values in (part.x, part.y))
    return x, y


def _blocks(population: Population) -> Iterator[np.ndarray]:
    """Yield all inputs in blocks, since they may lie in a file; those of the test sets are included."""
    for part in population.examples():
        for start in range(0, len(part.x), 4096):
            yield part.x[start : start + 4096]
