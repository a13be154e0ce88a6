"""Partitions that follow the data: their own clients, or equal parts, class mixes or disjoint classes by domain."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import ClientRows, Dataset, draw_groups
from rayfed.data.partitions.base import (
    ASSIGNMENT,
    MAX_DRAWS,
    TEST,
    TEST_HELP,
    VALIDATION,
    Partition,
    by_class,
    describe_tests,
    without_share,
)


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """One client per domain, or several that share it equally; the dataset's own test examples are used for testing.

    FedDebias has two clients in each domain of PACS: `clients_per_domain=2`. ADCOL divides each source into ten parts
    of which 2, 4, …, 10 take part: `parts=10 clients_per_domain=2` (its other rules are options of the image datasets).

    If domains share leakage groups, test and validation rows are drawn by group, for all domains at once.
    """

    follows_seed: ClassVar[bool] = False

    clients_per_domain: int = option(1, low=1, help="clients per domain, which get random equal parts of its rows")
    parts: int | None = option(
        None, low=1, help="number of equal parts of a domain, of which each client gets one; null: clients_per_domain"
    )
    test: float | None = option(
        None, low=0, below=1, help=f"{TEST_HELP.format('domain')}; null: the dataset's own test examples"
    )

    def __post_init__(self) -> None:
        if self.parts is not None and self.parts < (clients := self.clients_per_domain):
            raise UsageError(f"partition.parts={self.parts}: fewer than partition.clients_per_domain={clients}")

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, self.test)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        clients: list[ClientRows] = []
        pools = self._pools(dataset)
        validated = self.given_validation(dataset)
        if validated is None:
            train_rows = np.concatenate([np.empty(0, int), *(train for train, _ in pools.values())])
            random = numpy_generator(self.seed, VALIDATION)
            validated = draw_groups(dataset, train_rows, random, 1 - self.drawn_validation)
        for position, (train, test) in pools.items():
            domain = dataset.domains[position]
            parts = zip(self.assign_rows(dataset, train, position), self._equal_parts(test), strict=True)
            for client_train, client_test in parts:
                clients.append(self.client_rows(len(clients), domain, client_train, client_test, validated))
        return clients

    def assign_rows(self, dataset: Dataset, rows: np.ndarray, position: int) -> list[np.ndarray]:
        """Return each client's training rows, out of the shuffled `rows` of the domain at `position`."""
        return self._equal_parts(rows)

    def _equal_parts(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(rows, self.parts or self.clients_per_domain)[: self.clients_per_domain]

    def _pools(self, dataset: Dataset) -> dict[int, tuple[np.ndarray, np.ndarray]]:
        """Return the shuffled training and test rows of each domain that clients may hold, by its position."""
        pools, tested, validated = {}, None, self.given_validation(dataset)
        if self.test is not None:
            rows = dataset.rows()
            rows = rows if validated is None else rows[~validated[rows]]
            tested = draw_groups(dataset, rows, numpy_generator(self.seed, TEST), 1 - self.test)
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            if self.test is None:
                train, test = (
                    numpy_generator(self.seed, ASSIGNMENT, position, int(is_test)).permutation(
                        dataset.rows(is_test=is_test, domain=domain)
                    )
                    for is_test in (False, True)
                )
            else:
                rows = numpy_generator(self.seed, TEST, position).permutation(dataset.rows(domain=domain))
                if tested is None:
                    train, test = without_share(rows, self.test, validated)
                else:
                    train, test = rows[~tested[rows]], rows[tested[rows]]
            pools[position] = train, test
        return pools


MIX = 1  # purpose of a stream of its own, beside the two of Domains with ASSIGNMENT


@dataclass(frozen=True, kw_only=True)
class DomainMixes(Domains):
    """The clients of de Luca et al. 2022 (data augmentation for federated domain generalisation): 12 in 3 domains.

    In a domain with n training rows, each of k clients draws a size ~ Normal(n / (k + 1), `size_sd`²) and a class mix
    ~ Dirichlet(`alpha` x base) over the domain's classes, where base sums to 1. One client after the other then takes
    floor(size x mix) rows of each class, or as many as are left. As in the authors' code, a client whose classes run
    out stays smaller, most of all the last one. Therefore more than 1/(k + 1) of the rows remain unused: with k = 4
    about 24% in PACS's domains, and 33% in domains with 65 classes as uneven as OfficeHome's.
    """

    follows_seed: ClassVar[bool] = True

    clients_per_domain: int = option(4, low=1, help="number of clients per domain")
    alpha: float = option(200.0, above=0, help="concentration, summed over all classes")
    base: str = option(
        "ones", choices=("ones", "prior"), help="mean of the mixes: equal classes, or the domain's class frequencies"
    )
    size_sd: float = option(100.0, low=0, help="standard deviation of the client sizes, in rows")

    def __post_init__(self) -> None:
        if self.parts is not None:
            raise UsageError(f"partition.parts={self.parts}: this partition draws the sizes; leave the option out")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray, position: int) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT, position, 0, MIX)
        stacks = by_class(dataset, rows)
        available = np.array([len(stack) for stack in stacks])
        present, clients = available > 0, self.clients_per_domain
        base = available[present] if self.base == "prior" else np.ones(present.sum())
        for _ in range(MAX_DRAWS):
            sizes = random.normal(len(rows) / (clients + 1), self.size_sd, clients).clip(0)
            counts = np.zeros((clients, len(available)), int)
            counts[:, present] = sizes[:, None] * random.dirichlet(self.alpha * base / base.sum(), clients)
            ends = np.minimum(counts.cumsum(0), available)  # nothing is taken of a class that has run out
            starts = np.vstack([np.zeros_like(available), ends[:-1]])
            if (ends > starts).any(1).all():
                return [
                    np.concatenate([stack[i:j] for stack, i, j in zip(stacks, first, last, strict=True)])
                    for first, last in zip(starts, ends, strict=True)
                ]
        raise UsageError(
            f"partition.clients_per_domain={clients}: in each of {MAX_DRAWS} draws, a client of domain "
            f"{dataset.domains[position]} got no row; use fewer clients, or a smaller partition.size_sd"
        )


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """One client for each group of classes of a domain; the groups are consecutive and as equal as possible.

    Two groups of seven classes are 0-3 and 4-6 (FedDebias's split of PACS). A client's test part consists of the
    domain's own test examples of its classes, or with `test_absent` of those of the other classes, which shows how a
    model treats classes that it never saw. If several clients could receive such an example, one is drawn at random.
    """

    groups: int = option(2, low=2, help="number of groups of classes, and thus of clients, in each domain")
    per_client: int | None = option(None, low=1, help="maximum of rows per client, before validation is held out")
    test_absent: bool = option(False, help="test on the classes that the client does not have")

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, None)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        labels, count = dataset.divided_by()
        groups, validated = np.array_split(np.arange(count), self.groups), self.given_validation(dataset)
        clients: list[ClientRows] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            train, test = (dataset.rows(is_test=is_test, domain=domain) for is_test in (False, True))
            test_groups = self._test_groups(labels[test], groups, position)
            for group, classes in enumerate(groups):
                rows = train[np.isin(labels[train], classes)]
                rows = numpy_generator(self.seed, ASSIGNMENT, position, group).permutation(rows)[: self.per_client]
                tests = test[test_groups == group]
                clients.append(self.client_rows(len(clients), domain, rows, tests, validated))
        return clients

    def _test_groups(self, labels: np.ndarray, groups: list[np.ndarray], position: int) -> np.ndarray:
        """Return the group of classes whose client gets each test example, [n]."""
        own_group = np.searchsorted([classes[-1] for classes in groups], labels)
        if not self.test_absent:
            return own_group
        shift = numpy_generator(self.seed, TEST, position).integers(1, self.groups, len(labels))
        return (own_group + shift) % self.groups


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Each client holds the examples that belong to it in the dataset.

    A client's domain is that of its rows; if the dataset has only one domain, each client is a domain of its own.
    """

    follows_seed: ClassVar[bool] = False

    test: float | None = option(
        None, low=0, below=1, help=f"{TEST_HELP.format('client')}; null: the dataset's own test examples"
    )

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, self.test)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        if dataset.client is None:
            raise UsageError(f"partition=natural: {dataset.name} does not define clients; choose domains or iid")
        rows = dataset.rows()
        file_numbers, counts = np.unique(dataset.client[rows], return_counts=True)
        by_client = rows[np.argsort(dataset.client[rows], kind="stable")]
        validated = self.given_validation(dataset)
        clients = []
        for number, held in enumerate(np.split(by_client, np.cumsum(counts)[:-1])):
            if self.test is None:
                train, test = held[~dataset.is_test[held]], held[dataset.is_test[held]]
            else:
                train, test = self._drawn(held, self.test, number, validated)
            domain = dataset.domain_of(held) if len(dataset.domains) > 1 else f"client-{file_numbers[number]}"
            clients.append(self.client_rows(number, domain, train, test, validated))
        return clients

    def sizes(self, counts: np.ndarray) -> np.ndarray:
        """Return the examples of the training, validation and test parts of clients with `counts` examples [N, 3]."""
        different, places = np.unique(counts, return_inverse=True)
        parts = [[len(part) for part in self.of_client(0, int(count))] for count in different]
        return np.array(parts, np.int64)[places]

    def of_client(self, number: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the training, validation and test rows of a client with `count` examples and no test set of its own.

        They are those that `split` gives to the client `number`, counted from its first example.
        """
        rows = np.arange(count)
        train, test = (rows, rows[:0]) if self.test is None else self._drawn(rows, self.test, number)
        return self.client_rows(number, "", train, test)[2:]

    def _drawn(
        self, rows: np.ndarray, test: float, client: int, validated: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        return without_share(numpy_generator(self.seed, TEST, client).permutation(rows), test, validated)
