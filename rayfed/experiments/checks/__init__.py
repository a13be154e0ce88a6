"""What can be wrong with a trial before it starts: each check raises UsageError, with one line."""

from collections.abc import Callable, Sequence

from rayfed.core.errors import UsageError
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.checks.channel import check_channel, check_rounds_of_channel
from rayfed.experiments.checks.clock import check_bandwidths, check_buffered_rounds
from rayfed.experiments.checks.data import check_augmentation, check_examples, check_labels, check_unseen_clients
from rayfed.experiments.checks.inputs import check_inputs, check_training_mode
from rayfed.experiments.checks.loss import (
    check_events,
    check_labels_of_loss,
    check_masks,
    check_mixing,
    check_risk_sets,
)
from rayfed.experiments.checks.method import check_lost_clients, check_method
from rayfed.experiments.checks.model import check_single_examples, check_trainable
from rayfed.experiments.checks.placement import check_batches_at_once
from rayfed.experiments.checks.sampling import check_sampling
from rayfed.experiments.checks.trial import Trial

Check = Callable[[Trial], None]
"""Raises UsageError, with one line that names the key and what would be right."""

CHECKS_OF_MODEL: tuple[Check, ...] = (
    check_inputs,
    check_labels_of_loss,
    check_masks,
)
"""What can be checked before it is known what the outputs of the model stand for."""

CHECKS: tuple[Check, ...] = (
    check_events,
    check_risk_sets,
    check_training_mode,
    check_rounds_of_channel,
    check_augmentation,
    check_unseen_clients,
    check_examples,
    check_batches_at_once,
    check_trainable,
    check_bandwidths,
    check_buffered_rounds,
    check_method,
    check_labels,
    check_lost_clients,
    check_sampling,
    check_single_examples,
    check_channel,
    check_mixing,
)
"""In this order: the first that fails says what is wrong."""

CHECKS_AT_ONCE: tuple[Check, ...] = (
    check_batches_at_once,
    check_buffered_rounds,
    check_method,
)
"""Those of `CHECKS` that depend on how many clients train at once."""


def check_trial(blueprint: Blueprint, population: Population) -> Trial:
    """Return the trial, after all of `CHECKS`.

    Raises:
        UsageError: It cannot work.
    """
    trial = Trial(blueprint, population)
    go_through(CHECKS, trial)
    return trial


def settled(trial: Trial) -> Trial:
    """Return a checked trial with `vmap_clients` 1 in place of None where clients cannot train at once."""
    if trial.blueprint.vmap_clients is not None:
        return trial
    try:
        go_through(CHECKS_AT_ONCE, trial.at_once(2))
    except UsageError:
        return trial.at_once(1)
    return trial


def go_through(checks: Sequence[Check], trial: Trial) -> None:
    """Raise UsageError if one of `checks` refuses the trial."""
    for check in checks:
        check(trial)
