"""A few examples of a few clients, to try a plan on."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rayfed.data.clients import Client, ClientTable, Examples
from rayfed.data.population import Population


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
    return Examples(np.ascontiguousarray(part.x[:count]), part.y[:count])
