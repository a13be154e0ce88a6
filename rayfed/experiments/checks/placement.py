"""Checks of clients that train at once."""

from dataclasses import replace

from rayfed.core.errors import UsageError
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.checks.trial import Trial


def check_batches_at_once(trial: Trial) -> None:
    """Refuse batches of several sizes where clients train at once."""
    blueprint, sizes = trial.blueprint, trial.sizes
    if (blueprint.vmap_clients or 1) <= 1:
        return
    ragged = sizes.array % blueprint.batch_size > 0
    if blueprint.drop_last:
        ragged = sizes.array < blueprint.batch_size
    clients = sizes.where(ragged)
    if clients:
        raise UsageError(
            f"placement.vmap_clients={blueprint.vmap_clients}: clients that train at once need batches of one size, "
            f"and client {clients[0]} has {sizes[clients[0]]} training examples; use placement.vmap_clients=1, or "
            f"local.drop_last=true with local.batch_size={int(sizes.array.min())} or less"
        )


def two_at_once(trial: Trial) -> Trial:
    """Return the trial with two clients at once."""
    return Trial(_with_width(trial.blueprint, 2), trial.population)


def one_at_a_time(trial: Trial) -> Trial:
    """Return the trial with one client at a time."""
    return Trial(_with_width(trial.blueprint, 1), trial.population)


def _with_width(blueprint: Blueprint, width: int) -> Blueprint:
    return replace(blueprint, vmap_clients=width)
