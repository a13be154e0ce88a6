"""What tells a trial from others: its name, and the hashes of what the configuration does not say."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.modules import constant_names
from rayfed.core.trees import only, state_hash
from rayfed.engine.blueprint import Blueprint
from rayfed.experiments.config import CHANNEL_PARTS, COMPONENTS, Config
from rayfed.experiments.given import Given
from rayfed.experiments.plan_data import partition_seed
from rayfed.experiments.user_code import display_name, own_code, own_names
from rayfed.records.trials import recorded_value


def trial_name(config: Config, extra: str = "") -> str:
    """Return the name of a trial: its algorithm, its seed, and a hash of every value that can change its outcome.

    Places of hosts and results do not count. The number of rounds counts only if the first rounds depend on it, because
    a trial continues with more rounds. `extra` has the hashes of clients, model and loss given in Python.
    """
    digest = hashlib.blake2b((outcome_values(config) + extra).encode(), digest_size=4)
    name = config.algorithm_name.rpartition(":")[2]
    return f"{name}-seed{config.seed}-{digest.hexdigest()}"


def outcome_values(config: Config) -> str:
    """Return as JSON the values of a configuration that distinguish trials; see `trial_name`."""
    tree = config.tree()
    for key in ("results", "experiment", "resume", "checkpoint", "faults", "state", "tracking"):
        tree.pop(key)
    tree["evaluate"].pop("predictions")
    if not depends_on_rounds(config):
        tree.pop("rounds")
    if tree["partition"].get("seed") is None:
        tree["partition"]["seed"] = config.seed
    tree["placement"] = _placement_values(tree["placement"])
    for key in CHANNEL_PARTS:
        if tree[key] == {"name": COMPONENTS[key]}:
            tree.pop(key)
    return json.dumps(tree, sort_keys=True, default=str)


def _placement_values(placement: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a placement that can change bits; those of kernels only where they are on."""
    values = {key: placement[key] for key in ("vmap_clients", "threads", "gpus")}
    for key in ("deterministic", "tf32"):
        if placement[key]:
            values[key] = True
    return values


def depends_on_rounds(config: Config) -> bool:
    """Return whether the first rounds depend on the number of rounds."""
    private = config.privacy.name != "none" and config.privacy.build().depends_on_rounds
    scheduled = config.lr_schedule.build().depends_on_rounds
    of_records = config.local.privacy
    solved = of_records is not None and of_records.target_epsilon is not None
    return bool(scheduled or config.algorithm.traits.depends_on_rounds or private or solved)


def identity_of(config: Config, given: Given, blueprint: Blueprint, contents: str) -> dict[str, Any]:
    """Return the fields of a `Plan` that tell its trial from others.

    Args:
        config, given: The configuration, and what replaces parts of it.
        blueprint: The blueprint, with the initial weights of the model.
        contents: The hash of the clients given in Python, "" without any.

    Raises:
        UsageError: `config` resumes a trial that had other code or other frozen weights.
    """
    model_label = None
    weights_hash = ""
    weights = dict(blueprint.model.named_parameters()) | dict(blueprint.model.named_buffers())
    if given.model is not None:
        model_label = display_name(given.model, blueprint.model)
        weights_hash = state_hash(weights)
    loss_label = None
    if given.loss is not None:
        loss_label = display_name(given.loss, given.loss)
    trial = trial_name(config, f"{contents}{weights_hash}{model_label or ''}{loss_label or ''}")
    code = own_code(own_names(config), given.model, given.loss, given.clients)
    fixed = constant_names(blueprint.model, frozen_batch_norm=config.batch_norm == "frozen")
    base_hash = None
    if fixed:
        base_hash = state_hash(only(weights, fixed))
    _check_resumed(config, trial, code.digest, base_hash)
    seed = None
    if given.clients is None:
        seed = partition_seed(config)
    return {
        "trial": trial,
        "partition_seed": seed,
        "clients_hash": contents[:12] or None,
        "model_label": model_label,
        "loss_label": loss_label,
        "code_hash": code.digest,
        "base_hash": base_hash,
        "sources": code.sources,
        "incomparable": code.incomparable,
    }


def _check_resumed(config: Config, trial: str, code: str | None, base: str | None) -> None:
    """Raise UsageError if `config` resumes `trial`, which had other code or a model of other frozen weights."""
    if not config.resume:
        return

    def has_changed(column: str, now: str | None) -> bool:
        before = recorded_value(config.results, config.experiment, trial, column)
        return before not in (None, now)

    if config.resume is True and has_changed("code_hash", code):
        raise _changed(config, trial, "your own code", "resume=anyway if only comments did")
    if has_changed("base_hash", base):
        raise _changed(config, trial, "the frozen weights of the model", "the same weights")


def _changed(config: Config, trial: str, what: str, remedy: str) -> UsageError:
    return UsageError(
        f"resume={str(config.resume).lower()}: {what} changed since {trial} ran; give {remedy}, another experiment, or "
        "resume=false"
    )
