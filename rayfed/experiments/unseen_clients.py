"""Unseen clients: clients that take no part in training and join when it is over, as in DBE's "new participants"."""

from dataclasses import replace

from rayfed.core.errors import UsageError
from rayfed.core.rng import generator
from rayfed.data.draws import floor_share
from rayfed.data.population import Population


def set_apart(population: Population, asked: int | float, seed: int) -> Population:
    """`population` with so many unseen clients (a number, or a share of all clients rounded down), drawn by `seed`.

    Participants come first and unseen clients last, both in the order of their numbers.

    Raises:
        UsageError: nobody would be left to train.
    """
    clients = sorted(population.clients, key=lambda client: client.id)  # as before any earlier draw
    count = floor_share(len(clients), asked) if isinstance(asked, float) else asked
    if count >= len(clients):
        raise UsageError(f"unseen_clients={asked}: there are {len(clients)} clients, and one at least must train")
    # The stream keeps its first name, so that a seed draws the same clients for ever.
    drawn = set(generator(seed, "newcomers").choice(len(clients), count, replace=False).tolist())
    ordered = sorted(range(len(clients)), key=lambda place: place in drawn)
    return replace(population, clients=tuple(clients[place] for place in ordered), unseen_clients=count)
