"""Checks of labels and outputs by the loss."""

import math

from torch import nn

from rayfed.algorithms.common.soft_labels import soft
from rayfed.core.errors import UsageError, error_line
from rayfed.core.outputs import are_survival
from rayfed.data.population import Population
from rayfed.experiments.checks.trial import Trial
from rayfed.losses.base import CrossEntropy, Loss, NamedLoss
from rayfed.losses.survival import Cox
from rayfed.models.remedies import is_one_hot


def check_labels_of_loss(trial: Trial) -> None:
    """Refuse labels that the loss cannot take."""
    population = trial.population
    loss = trial.loss
    if isinstance(loss, NamedLoss):
        for part in population.examples():
            loss.check_labels(population.name, part.y)
    if isinstance(loss, CrossEntropy):
        _refuse_numbers(population)


def _refuse_numbers(population: Population) -> None:
    """Refuse labels that are no classes, which cross-entropy takes."""
    labels = population.clients[0].train.y
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


def check_masks(trial: Trial) -> None:
    """Refuse a model of rayfed's that gives every pixel a class, where the labels are no masks."""
    if trial.own_model or trial.population.clients[0].train.y.ndim != 1:
        return
    if isinstance(getattr(trial.blueprint.model, "head", None), nn.Conv2d):
        name = trial.population.name
        raise UsageError(f"{trial.model_key}: gives every pixel a class, and needs masks, of which {name} has none")


def check_events(trial: Trial) -> None:
    """Refuse data of survival without any event."""
    if trial.blueprint.outputs.kind == "survival" and not any(events_of_clients(trial.population)):
        where = f"loss: no client of {trial.population.name}"
        raise UsageError(f"{where} has an event in its training data, so nothing is learnt")


def check_risk_sets(trial: Trial) -> None:
    """Refuse batches of one example for a loss that compares examples with each other."""
    if isinstance(trial.loss, Cox) and trial.blueprint.batch_size == 1:
        raise UsageError(
            "local.batch_size=1: loss.name=cox compares the examples of a batch with each other, so nothing is learnt "
            "from one; give at least 2, better as many as have several events"
        )


def events_of_clients(population: Population) -> list[int]:
    """Return the number of events, labels [event, time], in the training data of each participant."""
    return [int(client.train.y[:, 0].sum()) for client in population.participants]


def check_mixing(trial: Trial) -> None:
    """Refuse a method that takes means of labels where the loss does not take them, or leaves labels out."""
    blueprint = trial.blueprint
    if not blueprint.algorithm.traits.mixes_labels:
        return
    where = f"{trial.named}: mixes labels, and"
    ignored = blueprint.outputs.ignored
    if ignored is not None:
        raise UsageError(f"{where} {ignored} stands for no class; use a method without mixtures")
    if blueprint.outputs.kind == "survival":
        raise UsageError(f"{where} an event and a time have no mean; use a method without mixtures")
    outputs, y = trial.first_outputs(3)
    task = trial.ctx.task
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
