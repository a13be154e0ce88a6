"""The clients of a plan, with their examples: loaded or given, with unseen clients drawn, standardised, and checked."""

from dataclasses import replace

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.rng import floor_share, generator
from rayfed.data.loading import build_data, load, population_without_clients, population_without_domain
from rayfed.data.population import Population, population_hash
from rayfed.data.sets import TABLES
from rayfed.data.standardise import Kind, standardised
from rayfed.data.user_clients import user_population
from rayfed.data.without import names_in, other_options
from rayfed.experiments.config import Config
from rayfed.experiments.given import Given
from rayfed.losses.base import CrossEntropy, Loss


def planned_population(
    config: Config, given: Given, loss: Loss, population: Population | None
) -> tuple[Population, str]:
    """Return the clients of a plan, and a hash of the contents of those given in Python ("" without any).

    Args:
        config, given: The configuration, and what replaces parts of it.
        loss: The loss that scores models. Cross-entropy takes labels for classes.
        population: The data of `config`, if they are loaded already.

    Raises:
        UsageError: There are no such data, or a client has nothing to train on.
    """
    contents = ""
    if given.clients is not None:
        _refuse_named_data(config)
        population = user_population(given.clients, given.num_classes, classes=isinstance(loss, CrossEntropy))
        contents = population_hash(population)  # before unseen clients are drawn, so that the seed does not change it
        population = population_without_clients(population, names_in(config.data.options))
        population = population_without_domain(population, config.leave_out)
    elif population is None:
        population = load_data(config)
    population = with_unseen_clients(population, config.unseen_clients or config.unseen_share, config.seed)
    kind = standardised_by(config)
    if kind:
        population = standardised(population, kind)
    _refuse_empty_clients(population)
    _refuse_parts(config, population)
    return population, contents


def _refuse_named_data(config: Config) -> None:
    """Refuse keys of data and partition beside clients given in Python."""
    why = "clients= are given in place of data and partition"
    if config.partition.options or config.partition.name is not None:
        raise UsageError(f"partition.*: {why}; leave out partition.*")
    if other_options(config.data.options) or config.data.name != "mini_digits":
        raise UsageError(f"data.*: {why}; leave out data.* except data.without")


def _refuse_empty_clients(population: Population) -> None:
    """Refuse clients without an example to train on."""
    empty = np.flatnonzero(population.clients.train_sizes() == 0)
    if len(empty):
        raise UsageError(
            f"{population.name}: client {population.clients.id(int(empty[0]))} has no training examples, as "
            f"{len(empty)} of {len(population.clients)} clients; leave them out, or give each at least one"
        )


def _refuse_parts(config: Config, population: Population) -> None:
    """Refuse inputs of several parts where something computes with inputs of one array."""
    if population.layout is None:
        return
    key = None
    if config.algorithm.traits.computes_with_inputs:
        key = f"algorithm.name={config.algorithm_name}"
    elif config.augment.name not in (None, "none"):
        key = f"augment.name={config.augment.name}"
    if key is not None:
        raise UsageError(f"{key}: computes with inputs of one array, and these have {population.layout}")


def load_data(config: Config) -> Population:
    """Return the data of a configuration, before unseen clients are drawn."""
    data = config.data
    partition = config.partition
    return load(data.name or "", data.options, partition.name, partition.options, config.leave_out, config.seed)


def standardised_by(config: Config) -> Kind | None:
    """Return by which rows the columns of a table are standardised (`data.standardize`), None: they are not."""
    if config.data.name not in TABLES:
        return None
    kind: Kind | None = config.data.options.get("standardize")
    return kind


def data_key(config: Config) -> str:
    """Return a string that two configurations share if their clients hold the same examples."""
    return repr((config.data, config.partition, config.leave_out, partition_seed(config)))


def partition_seed(config: Config) -> int | None:
    """Return the seed with which the partition of `config` draws; None if a user's own partition has none."""
    data = config.data
    partition = config.partition
    _, built = build_data(data.name or "", data.options, partition.name, partition.options, config.seed)
    seed = getattr(built, "seed", None)
    if seed is None:
        return None
    return int(seed)


def with_unseen_clients(population: Population, count: int | float, seed: int) -> Population:
    """Draw unseen clients: they take no part in training and join after it, as DBE's "new participants".

    Participants come first and unseen clients last, both in the order of their ids.

    Args:
        population: The clients. Unseen clients of an earlier draw are participants again.
        count: The number of unseen clients, or (a float) a share of all clients, rounded down.
        seed: The seed of the draw.

    Raises:
        UsageError: No client would be left to train.
    """
    clients = population.clients.select(np.argsort(population.clients.ids, kind="stable"))
    if isinstance(count, float):
        number = floor_share(len(clients), count)
    else:
        number = count
    if number >= len(clients):
        raise UsageError(f"unseen_clients={count}: there are {len(clients)} clients, and at least one must train")
    is_unseen = np.zeros(len(clients), bool)
    is_unseen[generator(seed, "unseen clients").choice(len(clients), number, replace=False)] = True
    ordered = clients.select(np.argsort(is_unseen, kind="stable"))
    return replace(population, clients=ordered, unseen_clients=number)
