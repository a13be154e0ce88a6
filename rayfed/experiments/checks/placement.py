"""Checks of clients that train at once."""

from rayfed.core.errors import UsageError
from rayfed.experiments.checks.trial import Trial


def check_batches_at_once(trial: Trial) -> None:
    """Refuse batches of several sizes where clients train at once."""
    blueprint = trial.blueprint
    sizes = trial.sizes
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
