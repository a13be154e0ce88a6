"""The population: clients, which are made from the source of their examples when asked for, and the test sets."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, overload

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientId
from rayfed.core.layout import Layout
from rayfed.data.on_disk import LazyRows, select_rows

if TYPE_CHECKING:
    from rayfed.data.standardise import Standardisation

SPLITS = ("train", "val", "test")
BLOCK = 1024  # examples that are hashed or checked at a time
LOOKED_AT = 8  # clients that are made to look at the data where all of them are made on demand


@dataclass(frozen=True)
class Examples:
    """Labelled examples: inputs `x` [n, ...] and class indices `y`, int64 [n], or targets [n, ...] of a user's loss.

    Images are uint8 [n, channels, height, width]; each batch is converted to floats and normalised on the device. Any
    other dtype reaches the model unchanged. `x` may be `LazyRows` of a file, which are read when they are needed.
    Inputs of several parts are packed into rows, int32 [n, words], in which `layout` finds them.
    """

    x: np.ndarray | LazyRows
    y: np.ndarray
    layout: Layout | None = None

    def __len__(self) -> int:
        return len(self.y)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.x.shape[1:])

    @property
    def dtype(self) -> "np.dtype[Any]":
        """The type of the inputs."""
        return self.x.dtype

    @property
    def is_on_disk(self) -> bool:
        """Whether the inputs are in a file."""
        return isinstance(self.x, LazyRows)

    @property
    def nbytes(self) -> int:
        """The bytes of inputs and labels."""
        return self.x.nbytes + self.y.nbytes

    def read(self) -> "Examples":
        """Return the same examples in memory."""
        if isinstance(self.x, LazyRows):
            return replace(self, x=self.x[:])
        return self

    def select(self, rows: Any) -> "Examples":
        """Return a selection of these examples; inputs in a file are not read."""
        return Examples(select_rows(self.x, rows), self.y[rows], self.layout)

    def blocks(self) -> Iterator[np.ndarray]:
        """Yield the inputs in memory, `BLOCK` at a time."""
        for start in range(0, len(self), BLOCK):
            yield self.x[start : start + BLOCK]

    @classmethod
    def joined(cls, parts: Sequence["Examples"]) -> "Examples":
        """Return the examples of `parts` in memory, one part after the other. Empty parts do not change their type."""
        filled = [part for part in parts if len(part)] or parts
        x = np.concatenate([part.x for part in filled])
        y = np.concatenate([part.y for part in filled])
        return cls(x, y, parts[0].layout)


@dataclass(frozen=True)
class Client:
    """One client: its number, its domain, and its three disjoint parts."""

    id: int
    domain: str
    train: Examples
    val: Examples
    test: Examples

    @property
    def parts(self) -> tuple[Examples, Examples, Examples]:
        """The training, validation and test parts."""
        return self.train, self.val, self.test


class ClientSource(Protocol):
    """The origin of the examples of clients. It knows a client by its number, which never changes."""

    def parts(self, number: int) -> tuple[Examples, Examples, Examples]:
        """Return the training, validation and test parts of a client."""

    def examples(self) -> Sequence[Examples]:
        """Return all examples in as few pieces as possible, or those of a few clients if they are made on demand."""

    def read(self) -> "ClientSource":
        """Return the same source with all examples in memory."""


@dataclass(frozen=True)
class PooledExamples:
    """The examples of all clients in one array each, so that many clients take no more memory than their examples.

    Attributes:
        pool: The examples, client by client, each with its training, validation and test part in order.
        bounds: Where the parts begin and the last one ends, int64 [3 N + 1].
    """

    pool: Examples
    bounds: np.ndarray

    def parts(self, number: int) -> tuple[Examples, Examples, Examples]:
        first = 3 * number
        start, val, test, end = self.bounds[first : first + 4].tolist()
        select = self.pool.select
        held = slice(start, val), slice(val, test), slice(test, end)
        train_part, val_part, test_part = map(select, held)
        return train_part, val_part, test_part

    def examples(self) -> Sequence[Examples]:
        return [self.pool]

    def read(self) -> "PooledExamples":
        return replace(self, pool=self.pool.read())


@dataclass(frozen=True)
class ListedClients:
    """Clients that were given one by one."""

    clients: tuple[Client, ...]

    def parts(self, number: int) -> tuple[Examples, Examples, Examples]:
        return self.clients[number].parts

    def examples(self) -> Sequence[Examples]:
        examples: list[Examples] = []
        for client in self.clients:
            examples += client.parts
        return examples

    def read(self) -> "ListedClients":
        read = []
        for client in self.clients:
            train, val, test = (part.read() for part in client.parts)
            read.append(Client(client.id, client.domain, train, val, test))
        return ListedClients(tuple(read))


@dataclass(frozen=True)
class MadeClients:
    """Clients that are made on demand, as often as they are needed.

    Attributes:
        make: Returns the parts of a client, always the same ones.
        sizes: The examples of the parts that `make` must return, int64 [N, 3].
    """

    make: Callable[[int], tuple[Examples, Examples, Examples]]
    sizes: np.ndarray

    def parts(self, number: int) -> tuple[Examples, Examples, Examples]:
        parts = self.make(number)
        sizes = self.sizes[number].tolist()
        for split, part, size in zip(SPLITS, parts, sizes, strict=True):
            if len(part) != size:
                returned = f"make({number}) returned {len(part)} {split} examples"
                raise UsageError(f"clients: {returned}, but sizes[{split!r}][{number}] is {size}")
        return parts

    def examples(self) -> Sequence[Examples]:
        looked_at: list[Examples] = []
        for number in spread(len(self.sizes), LOOKED_AT):
            looked_at += self.parts(number)
        return looked_at

    def read(self) -> "MadeClients":
        return self


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of the numbers below `count`, evenly spaced, the first and the last among them."""
    places = np.linspace(0, count - 1, min(count, most))
    return np.unique(places.round().astype(int)).tolist()


class ClientTable(Sequence[Client]):
    """All clients in order. A client is made from its source when it is asked for; the columns exist from the start.

    Attributes:
        source: Where the examples come from.
        sizes: The examples of the training, validation and test parts, int64 [N, 3].
        domains: The domains in UTF-8, bytes [N]: an array of objects would be copied to every process.
        ids: The numbers that the partition gave the clients, int64 [N].
        numbers: The numbers of the clients in `source`, int64 [N].
    """

    def __init__(
        self,
        source: ClientSource,
        sizes: np.ndarray,
        domains: np.ndarray | Sequence[str],
        ids: np.ndarray | None = None,
        numbers: np.ndarray | None = None,
    ):
        self.source = source
        self.sizes = sizes
        if isinstance(domains, np.ndarray):
            self.domains = domains
        else:
            self.domains = np.array([name.encode() for name in domains])
        if ids is None:
            self.ids = np.arange(len(sizes))
        else:
            self.ids = ids
        if numbers is None:
            self.numbers = np.arange(len(sizes))
        else:
            self.numbers = numbers

    @classmethod
    def of(cls, clients: Sequence[Client]) -> "ClientTable":
        """Return the table of clients that exist already."""
        if isinstance(clients, cls):
            return clients
        listed = tuple(clients)
        counts = []
        for client in listed:
            counts.append([len(part) for part in client.parts])
        sizes = np.array(counts, np.int64).reshape(-1, 3)
        ids = np.array([client.id for client in listed], np.int64)
        return cls(ListedClients(listed), sizes, [client.domain for client in listed], ids)

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, place: int) -> Client: ...
    @overload
    def __getitem__(self, place: slice) -> "ClientTable": ...
    def __getitem__(self, place: int | slice) -> "Client | ClientTable":
        if isinstance(place, slice):
            return self.select(place)
        number = int(self.numbers[place])
        train, val, test = self.source.parts(number)
        return Client(self.id(place), self.domain(place), train, val, test)

    def __iter__(self) -> Iterator[Client]:
        return (self[place] for place in range(len(self)))

    def id(self, place: int) -> int:
        """Return the number that the partition gave a client, without making the client."""
        return int(self.ids[place])

    def domain(self, place: int) -> str:
        """Return the domain of a client, without making the client."""
        return bytes(self.domains[place]).decode()

    def domain_names(self) -> list[str]:
        """Return the names of all domains, sorted."""
        names = np.unique(self.domains).tolist()
        return sorted(name.decode() for name in names)

    def are_of(self, domain: str) -> np.ndarray:
        """Return which clients belong to `domain`, bool [N]."""
        return np.asarray(self.domains == domain.encode())

    def train_sizes(self) -> np.ndarray:
        """Return the numbers of training examples, int64 [N]."""
        return self.sizes[:, 0]

    @property
    def have_validation(self) -> bool:
        """Whether any client has validation examples."""
        return bool(self.sizes[:, 1].any())

    @cached_property
    def _order(self) -> np.ndarray:
        return np.argsort(self.ids, kind="stable")

    def place(self, id: int) -> int:
        """Return the place of the client with the number `id`; KeyError if there is no such client."""
        found = int(np.searchsorted(self.ids, id, sorter=self._order))
        if found == len(self):
            raise KeyError(id)
        place = int(self._order[found])
        if self.ids[place] != id:
            raise KeyError(id)
        return place

    def select(self, places: Any) -> "ClientTable":
        """Return the clients at `places`, an array or a slice, in that order; all in their order are this table."""
        everyone = np.arange(len(self))
        rows = everyone[places]
        if np.array_equal(rows, everyone):
            return self
        return ClientTable(self.source, self.sizes[rows], self.domains[rows], self.ids[rows], self.numbers[rows])

    def renumbered(self) -> "ClientTable":
        """Return the same clients with the numbers 0 to N - 1 in this order."""
        return ClientTable(self.source, self.sizes, self.domains, None, self.numbers)

    def read(self) -> "ClientTable":
        """Return the same clients with all examples in memory."""
        return self.with_source(self.source.read())

    def with_source(self, source: ClientSource) -> "ClientTable":
        """Return the same clients with as many examples from another source."""
        return ClientTable(source, self.sizes, self.domains, self.ids, self.numbers)


class SizesById(Mapping[ClientId, int]):
    """One number of each client, by the client's id, in the order of the clients."""

    def __init__(self, clients: ClientTable, values: np.ndarray):
        self._clients = clients
        self.array = values

    def __getitem__(self, id: ClientId) -> int:
        return int(self.array[self._clients.place(id)])

    def __iter__(self) -> Iterator[ClientId]:
        return (ClientId(id) for id in self._clients.ids.tolist())

    def __len__(self) -> int:
        return len(self.array)

    def where(self, holds: np.ndarray) -> list[ClientId]:
        """Return the ids of the clients for which `holds`, bool [N], is true."""
        return [ClientId(id) for id in self._clients.ids[holds].tolist()]


@dataclass(frozen=True)
class TestSet:
    """Examples of one domain to score the server's model on; `split` is "test" or "ood"."""

    __test__ = False  # not a pytest class

    domain: str
    split: str
    examples: Examples

    def __post_init__(self) -> None:
        if not len(self.examples):
            raise UsageError(f"test set {self.domain}: has no examples, or clients train on all of them")


@dataclass(frozen=True)
class Population:
    """All clients, the form of their examples, and the server's test sets.

    The engine and algorithms identify clients by their position in `clients`. `Client.id` is the number that the
    partition gave them; it differs from the position only if there are unseen clients.

    Attributes:
        name: Name of the dataset.
        clients: All clients, unseen clients last.
        num_classes: Number of classes.
        shape: Shape of one input.
        mean, std: Per channel in units of [0, 1], to normalise uint8 images: (x / 255 - mean) / std.
        tests: The server's test sets.
        partition_hash: Hash of which client holds which rows of the dataset, see `rayfed.data.partitions.base`; None
            for a user's own clients, whose tables show `population_hash` instead.
        unseen_clients: Number of clients that take no part in training and join when it is over.
        layout: Where the parts of an input lie in its row, if it has several; None for one array.
        test_source: On which examples clients are tested, and what becomes of validation examples that the data have.
            It is the end of a sentence; empty: not known.
        test_drawn: Whether the clients' test examples are drawn from their own rows, and not the dataset's own; None:
            not known.
        class_names: The names of the classes, if the labels are words.
        standardisation: How the inputs were standardised; None: they were not.
        left_out: The clients that `data.without` leaves out, in words; empty: none.
    """

    name: str
    clients: ClientTable
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tests: tuple[TestSet, ...] = ()
    partition_hash: str | None = None
    unseen_clients: int = 0
    test_source: str = ""
    test_drawn: bool | None = None
    class_names: tuple[str, ...] | None = None
    standardisation: "Standardisation | None" = None
    layout: Layout | None = None
    left_out: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", ClientTable.of(self.clients))  # any sequence of clients will do

    def examples(self) -> list[Examples]:
        """Return the examples of all clients in as few pieces as possible, then those of the test sets.

        Of clients that are made on demand, these are the examples of a few.
        """
        tests = [test.examples for test in self.tests]
        return [*self.clients.source.examples(), *tests]

    def nbytes(self) -> int:
        """Return the bytes of all examples; those of clients made on demand are taken to be as large as the first."""
        of_one = self.clients[0].train.select(slice(1)).nbytes
        tests = sum(test.examples.nbytes for test in self.tests)
        return int(self.clients.sizes.sum()) * of_one + tests

    def read(self) -> "Population":
        """Return the same population with all examples in memory."""
        tests = []
        for test in self.tests:
            tests.append(replace(test, examples=test.examples.read()))
        return replace(self, clients=self.clients.read(), tests=tuple(tests))

    @property
    def participants(self) -> ClientTable:
        """The clients that take part in training."""
        return self.clients[: len(self.clients) - self.unseen_clients]


def small_population(population: Population, clients: int, examples: Sequence[int], scored: int) -> Population:
    """Return at most `clients` participants of `population`, those with the most training examples.

    Args:
        examples: How many training examples the clients keep at most; the numbers are used in turn.
        scored: How many examples of each other part they keep at most, and so of each test set.
    """
    participants = population.participants
    by_size = np.argsort(-participants.train_sizes(), kind="stable")
    largest = participants.select(by_size[:clients])
    kept = []
    for number, client in enumerate(largest):
        train = _first(client.train, examples[number % len(examples)])
        val = _first(client.val, scored)
        test = _first(client.test, scored)
        kept.append(Client(number, client.domain, train, val, test))
    tests = []
    for test_set in population.tests:
        first = _first(test_set.examples, scored)
        tests.append(replace(test_set, examples=first))
    return replace(population, clients=ClientTable.of(kept), tests=tuple(tests), unseen_clients=0)


def inputs_in_double(population: Population) -> Population:
    """Return a small population with inputs in float64, images normalised; integers that stand for words stay."""

    def changed(part: Examples) -> Examples:
        x: Any = part.x[:]
        if x.dtype == np.uint8:
            mean = np.reshape(population.mean, (-1, 1, 1))
            std = np.reshape(population.std, (-1, 1, 1))
            x = (x / 255 - mean) / std
        elif x.dtype.kind == "f":
            x = x.astype(np.float64)
        return Examples(x, part.y, part.layout)

    clients = []
    for client in population.clients:
        parts = map(changed, client.parts)
        clients.append(Client(client.id, client.domain, *parts))
    tests = tuple(replace(test, examples=changed(test.examples)) for test in population.tests)
    return replace(population, clients=ClientTable.of(clients), tests=tests)


def _first(part: Examples, count: int) -> Examples:
    return part.select(slice(count)).read()


def class_counts(population: Population) -> list[tuple[int, str, str, int, int]]:
    """Return client, domain, split, class and number of examples, sorted by client; none for other targets."""
    counts = []
    for client in sorted(population.clients, key=lambda client: client.id):
        for split, part in zip(SPLITS, client.parts, strict=True):
            labels = part.y
            if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
                continue
            for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
                counts.append((client.id, client.domain, split, int(label), int(count)))
    return counts


def population_hash(population: Population) -> str:
    """Return the SHA-256 of all contents: every client's parts in order, the test sets, and the normalisation.

    Of clients that are made on demand, it covers all sizes and domains, and the contents of a few.
    """
    digest = hashlib.sha256()
    head: tuple[object, ...] = (population.num_classes, population.shape, population.mean, population.std)
    if population.layout:
        head = (*head, population.layout)
    digest.update(repr(head).encode())
    clients = population.clients
    places: Sequence[int] = range(len(clients))
    if isinstance(clients.source, MadeClients):
        places = spread(len(clients), LOOKED_AT)
        digest.update(np.ascontiguousarray(clients.sizes).data)
        digest.update(repr(clients.domain_names()).encode())
    for client in map(clients.__getitem__, places):
        digest.update(f"client {client.id} {client.domain}".encode())
        for part in client.parts:
            _update(digest, part)
    for test in population.tests:
        digest.update(f"test {test.domain} {test.split}".encode())
        _update(digest, test.examples)
    return digest.hexdigest()


def content_hash(examples: Examples) -> str:
    """Return the SHA-256 of inputs and labels."""
    digest = hashlib.sha256()
    _update(digest, examples)
    return digest.hexdigest()


def _update(digest: Any, examples: Examples) -> None:
    inputs = f"{examples.dtype.str}{examples.x.shape}"
    digest.update(inputs.encode())
    for block in examples.blocks():  # as the array may not fit into memory
        digest.update(np.ascontiguousarray(block).data)
    labels = f"{examples.y.dtype.str}{examples.y.shape}"
    digest.update(labels.encode())
    digest.update(np.ascontiguousarray(examples.y).data)
