"""Checks of the method, and of the clients that it may miss."""

from dataclasses import replace

from rayfed.core.errors import UsageError
from rayfed.engine.clock import Availability
from rayfed.experiments.checks.trial import Trial


def check_method(trial: Trial) -> None:
    """Have the method refuse what it cannot work with."""
    trial.blueprint.algorithm.check(trial.problem)


def check_lost_clients(trial: Trial) -> None:
    """Refuse that sampled clients may be missing, where the method needs them."""
    availability = trial.blueprint.availability
    if not availability.loses_clients:
        return
    key = key_of_lost_clients(availability)
    value = availability.dropout or availability.deadline
    where = f"{key}={value:g}: {trial.named}"
    if trial.blueprint.algorithm.traits.sample_without_replacement:
        raise UsageError(f"{where} divides its privacy budget over cohorts of a fixed size; leave the key out")
    if needs_all_clients(trial):
        raise UsageError(f"{where} needs every client in every round; leave the key out")


def key_of_lost_clients(availability: Availability) -> str:
    """Return the key by which sampled clients may be missing in a round."""
    if availability.dropout:
        return "availability.dropout"
    return "availability.deadline"


def needs_all_clients(trial: Trial) -> bool:
    """Return whether the method refuses rounds in which clients are missing, and nothing else."""
    return _accepts(trial, everyone=True) and not _accepts(trial, everyone=False)


def _accepts(trial: Trial, *, everyone: bool) -> bool:
    try:
        trial.blueprint.algorithm.check(replace(trial.problem, full_participation=everyone))
    except UsageError:
        return False
    return True
