"""Unseen clients: clients that take no part in training and join after it, as DBE's "new participants"."""

from dataclasses import replace

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.rng import generator
from rayfed.data.draws import floor_share
from rayfed.data.population import Population


def with_unseen_clients(population: Population, count: int | float, seed: int) -> Population:
    """Return `population` with unseen clients drawn at random.

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
