"""The blueprint of a plan: what its hosts and its server compute, in the engine's words."""

import dataclasses
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import nn

from rayfed.algorithm import Phase
from rayfed.augment.base import Augment, NoAugment
from rayfed.core.errors import UsageError
from rayfed.core.optim import SGD, Adam
from rayfed.core.rng import floor_share, global_generators_seeded
from rayfed.core.round_schedule import Buffered
from rayfed.core.task import loss_on
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.clock import Availability, Clock
from rayfed.experiments.config import Config
from rayfed.experiments.device_profile import read_profile
from rayfed.experiments.plan_channel import with_channel
from rayfed.losses.base import CrossEntropy, Loss, build_loss


def chosen_loss(config: Config, given: Loss | None) -> Loss:
    """Return the loss given in Python, else the one that `config` names.

    Raises:
        UsageError: Both are given, or there is no such loss.
    """
    name = config.loss.name or ""
    options = config.loss.options
    if given is None:
        with global_generators_seeded(config.seed, "loss"):
            return build_loss(name, options)
    if options or name != "cross_entropy":
        key = next(iter(options), f"name={name}")
        raise UsageError(f"loss.{key}: loss= is given in place of loss.*; leave out one of them")
    return loss_on("cpu", given)


def planned_blueprint(config: Config, population: Population, model: nn.Module, loss: Loss) -> Blueprint:
    """Return the blueprint of a configuration for its clients, with the channel around the method.

    Args:
        model: The model, with the initial weights.
        loss: The loss that scores models.

    Raises:
        UsageError: Keys do not go with the number of clients, the loss, or the profile of devices.
    """
    schedule: Buffered | None = None
    if config.schedule.name == "buffered":
        schedule = config.schedule.build()
    cohort = _cohort(config, len(population.participants), schedule)
    scoring_loss = loss
    if loss == CrossEntropy():
        scoring_loss = F.cross_entropy
    width: Any = config.placement.vmap_clients
    if isinstance(width, str):
        width = None
    return Blueprint(
        algorithm=with_channel(config, population, cohort),
        model=model,
        loss=scoring_loss,
        batch_norm=config.batch_norm,
        optimizer=_optimizer(config),
        local=_local_phase(config),
        batch_size=config.local.batch_size,
        drop_last=config.local.drop_last,
        rounds=config.rounds,
        cohort=cohort,
        seed=config.seed,
        keep_optimizer=config.local.keep_optimizer,
        vmap_clients=width,
        threads=config.placement.threads,
        deterministic=config.placement.deterministic,
        tf32=config.placement.tf32,
        cuda_graphs=config.placement.cuda_graphs,
        bf16=config.local.precision == "bf16",
        data_on_device=config.placement.data_on_device,
        augment=_augment(config),
        training_loss=_training_loss(config, loss),
        schedule=config.lr_schedule.build(),
        availability=Availability(**dataclasses.asdict(config.availability)),
        clock=_clock(config, population),
        buffered=schedule,
        sampler=config.sampling.build(),
    )


def _cohort(config: Config, participants: int, schedule: Buffered | None) -> int:
    """Return how many clients a round has."""
    if schedule is not None:
        return schedule.buffer
    cohort = config.cohort
    if cohort is None:
        cohort = max(1, floor_share(participants, config.cohort_share))
    if cohort > participants:
        raise UsageError(f"cohort={cohort}: there are {participants} clients; give at most that, or a cohort_share")
    return cohort


def _local_phase(config: Config) -> Phase:
    """Return how long clients train: one epoch, unless epochs or steps are given."""
    epochs = config.local.epochs or None
    if epochs is None and not config.local.steps:
        epochs = 1
    return Phase("train", epochs, config.local.steps)


def _optimizer(config: Config) -> SGD | Adam:
    local = config.local
    common: dict[str, Any] = {"lr": local.lr, "weight_decay": local.weight_decay, "clip_norm": local.clip_norm}
    if local.optimizer == "sgd":
        return SGD(momentum=local.momentum, nesterov=local.nesterov, **common)
    return Adam(decoupled=local.optimizer == "adamw", **common)


def _training_loss(config: Config, loss: Loss) -> Loss | None:
    """Return the loss that trains models; None if it is the loss that scores them."""
    smoothing = config.local.label_smoothing
    if not smoothing:
        return None
    if not isinstance(loss, CrossEntropy):
        raise UsageError(
            f"local.label_smoothing={smoothing}: smooths the labels of cross-entropy, and another loss is given; "
            "smooth them there, or leave it out"
        )
    return partial(loss, label_smoothing=smoothing)


def _augment(config: Config) -> Augment | None:
    augment: Augment = config.augment.build()
    if isinstance(augment, NoAugment):
        return None
    return augment


def _clock(config: Config, population: Population) -> Clock:
    options = dataclasses.asdict(config.clock)
    path = options.pop("profile")
    if not path:
        return Clock(**options, profile=())
    ids = [population.clients.id(place) for place in range(len(population.participants))]
    return Clock(**options, profile=read_profile(path, ids))
