"""What the engine is given: the clients and their examples, and the test sets that belong to nobody."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from rayfed.data.lazy_rows import LazyRows

BLOCK = 1024  # examples that are hashed at a time


@dataclass(frozen=True)
class Examples:
    """Labelled examples: `x` [n, ...] and `y` [n] (class index, int64) or [n, ...] for a user's own loss.

    Images are uint8 [n, channels, height, width]; they become floats, normalised, a batch at a time on the device.
    Any other dtype reaches the model as it is. `x` may be `LazyRows` of a file, which are read when they are needed.
    """

    x: np.ndarray | LazyRows
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.y)

    def read(self) -> "Examples":
        """The same in memory."""
        return replace(self, x=self.x[:]) if isinstance(self.x, LazyRows) else self


@dataclass(frozen=True)
class Client:
    """One client: its number, the domain that it belongs to, and its three disjoint parts."""

    id: int
    domain: str
    train: Examples
    val: Examples
    test: Examples


@dataclass(frozen=True)
class TestSet:
    """Examples of one domain that no client holds, scored with the server's model; split is "test" or "ood"."""

    __test__ = False  # not a pytest class

    domain: str
    split: str
    examples: Examples


@dataclass(frozen=True)
class Population:
    """All clients, what their examples look like, and the server's own test sets.

    The last `unseen_clients` of the clients take no part in training: they join when it is over. The engine and algorithms
    count clients by their place here; `Client.id` is the number that the partition gave them, and differs from the
    place only where there are unseen clients.

    `mean` and `std`, per channel in units of [0, 1], normalise uint8 images: (x / 255 - mean) / std.
    `partition_hash` says who holds which rows of a dataset (`rayfed.data.partitions.table`); None for a user's clients,
    for which the tables have a hash of all that they hold.
    """

    name: str
    clients: tuple[Client, ...]
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tests: tuple[TestSet, ...] = ()
    partition_hash: str | None = None
    unseen_clients: int = 0

    def examples(self) -> list[Examples]:
        """Of all clients, then of all test sets."""
        own = [part for client in self.clients for part in (client.train, client.val, client.test)]
        return own + [test.examples for test in self.tests]

    def read(self) -> "Population":
        """The same with all that lies in files read into memory."""
        clients = [replace(c, train=c.train.read(), val=c.val.read(), test=c.test.read()) for c in self.clients]
        tests = [replace(test, examples=test.examples.read()) for test in self.tests]
        return replace(self, clients=tuple(clients), tests=tuple(tests))

    @property
    def participants(self) -> tuple[Client, ...]:
        """The clients that take part in training."""
        return self.clients[: len(self.clients) - self.unseen_clients]


def population_hash(population: Population) -> str:
    """A sha256 over everything that training and scoring see: the parts of each client in order, and the test sets."""
    digest = hashlib.sha256()
    head = (population.num_classes, population.shape, population.mean, population.std)
    digest.update(repr(head).encode())
    for client in population.clients:
        digest.update(f"client {client.id} {client.domain}".encode())
        for part in (client.train, client.val, client.test):
            _update(digest, part)
    for test in population.tests:
        digest.update(f"test {test.domain} {test.split}".encode())
        _update(digest, test.examples)
    return digest.hexdigest()


def _update(digest, examples: Examples) -> None:
    for array in (examples.x, examples.y):
        digest.update(f"{array.dtype.str}{array.shape}".encode())
        for start in range(0, len(array), BLOCK):  # block by block: there may be more than fits into memory
            digest.update(np.ascontiguousarray(array[start : start + BLOCK]).data)
