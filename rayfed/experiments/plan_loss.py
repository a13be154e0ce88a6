"""What the outputs of a model stand for by its loss, found by trying both on a few examples before anything starts."""

import contextlib
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError, error_line
from rayfed.core.outputs import UNKNOWN, Outputs, meaning_of_outputs
from rayfed.core.rng import global_state_kept
from rayfed.core.task import is_known_loss, loss_on
from rayfed.data.population import Population
from rayfed.experiments.checks.trial import Trial
from rayfed.experiments.first_examples import first_batch
from rayfed.losses.base import CrossEntropy, Loss
from rayfed.models.remedies import reason_of_loss


def measured(trial: Trial) -> Trial:
    """Return a trial with what its outputs stand for, and whether those of an example depend on its batch.

    Raises:
        UsageError: The loss does not return one scalar for a batch that its outputs determine.
    """
    if trial.own_model and _rows_interact(trial):
        trial = trial.with_(rows_interact=True)
    labels = trial.population.clients[0].train.y
    if trial.loss == CrossEntropy() and labels.ndim == 1:
        return trial
    meaning = outputs_by_loss(trial)
    if meaning == trial.blueprint.outputs:
        return trial
    return trial.with_(outputs=meaning)


def _rows_interact(trial: Trial) -> bool:
    """Return whether an example's output depends on its batch, as by batch norm without statistics."""
    x, _ = first_batch(trial.population.clients[0].train, 3)
    with global_state_kept(), torch.no_grad():
        task = trial.ctx.task
        first = task.predict(task.initial_weights(), x[[0, 0]])[0]
        other = task.predict(task.initial_weights(), x[[0, -1]])[0]
    return not torch.allclose(first, other, rtol=1e-3, atol=1e-5, equal_nan=True)


def outputs_by_loss(trial: Trial) -> Outputs:
    """Return what the outputs stand for by the loss; see `measured`."""
    population = trial.population
    loss = loss_on("cpu", trial.blueprint.loss)  # its buffers may change

    def on_copies(outputs: Tensor, y: Tensor) -> Tensor:
        return loss(outputs.clone(), y.clone())  # as in training: it may change them in place

    outputs, labels = trial.first_outputs(2)
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
    return meaning


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
