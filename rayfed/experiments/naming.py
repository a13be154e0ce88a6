"""The names of trials."""

import hashlib
import json

from rayfed.experiments.config import Config


def trial_name(config: Config, extra: str = "") -> str:
    """Return the name of a trial: its algorithm, its seed, and a hash of every value that can change its outcome.

    Args:
        config: The configuration. Where the trial runs and where its results go do not count, and neither does the
            number of rounds, unless the first rounds depend on it: with more rounds, a trial goes on.
        extra: Hashes of what was given in Python: clients, model and loss.
    """
    digest = hashlib.blake2b((outcome_values(config) + extra).encode(), digest_size=4)
    name = config.algorithm_name.rpartition(":")[2]
    return f"{name}-seed{config.seed}-{digest.hexdigest()}"


def outcome_values(config: Config) -> str:
    """Return, as JSON, every value of the configuration that distinguishes trials; see `trial_name`."""
    tree = config.tree()
    for key in ("results", "experiment", "resume", "checkpoint", "faults", "state", "tracking"):
        tree.pop(key)
    if not depends_on_rounds(config):
        tree.pop("rounds")
    if tree["partition"].get("seed") is None:
        tree["partition"]["seed"] = config.seed
    place = tree["placement"]
    kernels = {key: True for key in ("deterministic", "tf32") if place[key]}
    tree["placement"] = {key: place[key] for key in ("vmap_clients", "threads", "gpus")} | kernels
    return json.dumps(tree, sort_keys=True, default=str)


def depends_on_rounds(config: Config) -> bool:
    """Return whether the first rounds depend on how many follow."""
    return bool(config.lr_schedule.build().depends_on_rounds or config.algorithm.depends_on_rounds)
