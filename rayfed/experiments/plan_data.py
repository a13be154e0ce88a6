"""The data of a plan: loaded, with unseen clients drawn, and cut to a few examples to try a plan on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from rayfed.core.errors import UsageError
from rayfed.core.rng import floor_share, generator
from rayfed.core.task import Batch
from rayfed.data.clients import Client, ClientTable, Examples
from rayfed.data.loading import build_data, load
from rayfed.data.population import Population
from rayfed.experiments.config import Config


def partition_seed(config: Config) -> int | None:
    """Return the seed with which the partition of `config` draws; None if a user's own partition has none."""
    data, partition = config.data, config.partition
    built = build_data(data.name or "", data.options, partition.name, partition.options, config.seed)[1]
    seed = getattr(built, "seed", None)
    return None if seed is None else int(seed)


def data_key(config: Config) -> str:
    """Return a string that two configurations share if their clients hold the same examples."""
    return repr((config.data, config.partition, config.leave_out, partition_seed(config)))


def load_data(config: Config) -> Population:
    """Return the data of a configuration, before unseen clients are drawn."""
    data, partition = config.data, config.partition
    return load(data.name or "", data.options, partition.name, partition.options, config.leave_out, config.seed)


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
    number = floor_share(len(clients), count) if isinstance(count, float) else count
    if number >= len(clients):
        raise UsageError(f"unseen_clients={count}: there are {len(clients)} clients, and at least one must train")
    is_unseen = np.zeros(len(clients), bool)
    is_unseen[generator(seed, "unseen clients").choice(len(clients), number, replace=False)] = True
    ordered = clients.select(np.argsort(is_unseen, kind="stable"))
    return replace(population, clients=ordered, unseen_clients=number)


def small_population(population: Population, clients: int, examples: Sequence[int], scored: int) -> Population:
    """Return at most `clients` participants of `population`, those with the most training examples.

    Args:
        examples: How many training examples the clients keep at most; the numbers are used in turn.
        scored: How many examples of each other part they keep at most, and so of each test set.
    """
    participants = population.participants
    largest = participants.select(np.argsort(-participants.train_sizes(), kind="stable")[:clients])
    kept = tuple(
        Client(
            number,
            client.domain,
            _first(client.train, examples[number % len(examples)]),
            _first(client.val, scored),
            _first(client.test, scored),
        )
        for number, client in enumerate(largest)
    )
    tests = tuple(replace(test, examples=_first(test.examples, scored)) for test in population.tests)
    return replace(population, clients=ClientTable.of(kept), tests=tests, unseen_clients=0)


def _first(part: Examples, count: int) -> Examples:
    return part.select(slice(count)).read()


def input_type(population: Population) -> torch.dtype:
    """Return the type in which inputs reach the model: images arrive as normalised floats."""
    dtype = torch.from_numpy(population.clients[0].train.x[:0]).dtype
    return torch.float32 if dtype == torch.uint8 else dtype


def first_batch(part: Examples, count: int) -> Batch:
    """Return the first `count` examples of a part in the type in which they reach the model; pixels stay 0 to 255."""
    x, y = (torch.from_numpy(values[:count].copy()) for values in (part.x, part.y))
    return Batch(x.float() if x.dtype == torch.uint8 else x, y)


def extreme_examples(population: Population) -> np.ndarray:
    """Return the examples with the smallest and the largest input at each position, those of test sets included."""
    extremes, layout = np.zeros((0, *population.shape), population.clients[0].train.dtype), population.layout
    for block in (block for part in population.examples() for block in part.blocks()):
        candidates = np.concatenate([extremes, block])
        flat = layout.integers(candidates) if layout else candidates.reshape(len(candidates), -1)
        extremes = candidates[np.unique([flat.argmin(0), flat.argmax(0)])] if flat.size else candidates[:2]
    return extremes
