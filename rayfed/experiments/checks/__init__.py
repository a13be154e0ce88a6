"""What can be wrong with a trial before it starts: each check raises UsageError, with one line."""

from collections.abc import Callable

from rayfed.core.errors import UsageError
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.checks.clock import check_bandwidths, check_buffered_rounds
from rayfed.experiments.checks.data import check_augmentation, check_examples, check_labels, check_unseen_clients
from rayfed.experiments.checks.method import check_lost_clients, check_method
from rayfed.experiments.checks.model import check_single_examples, check_trainable
from rayfed.experiments.checks.placement import check_batches_at_once
from rayfed.experiments.checks.sampling import check_sampling
from rayfed.experiments.checks.trial import Trial

CHECKS: tuple[Callable[[Trial], None], ...] = (
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
)
"""In this order: the first that fails says what is wrong."""


def check_trial(blueprint: Blueprint, population: Population) -> Trial:
    """Return the trial, after all checks.

    Raises:
        UsageError: It cannot work.
    """
    trial = Trial(blueprint, population)
    _check(trial)
    return trial


def settled(trial: Trial) -> Trial:
    """Return a checked trial with `vmap_clients` 1 in place of None where clients cannot train at once."""
    if trial.blueprint.vmap_clients is not None:
        return trial
    try:
        _check(trial.at_once(2))
    except UsageError:
        return trial.at_once(1)
    return trial


def _check(trial: Trial) -> None:
    for check in CHECKS:
        check(trial)
