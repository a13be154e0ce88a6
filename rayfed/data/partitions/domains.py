"""Partitions that follow the data: their own clients, or equal parts, class mixes or disjoint classes by domain."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import (
    ClientRows,
    Dataset,
    Mask,
    Rows,
    draw_groups,
    expand_groups,
    first_of_each_group,
    spread_groups,
)
from rayfed.data.partitions.base import (
    ASSIGNMENT,
    MAX_DRAWS,
    TEST,
    TEST_HELP,
    VALIDATION,
    Partition,
    by_class,
    describe_tests,
    divided,
    sizes_of,
    taken_from,
    with_groups,
    without_share,
)


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """One client per domain, or several that share it equally; the dataset's own test examples are used for testing.

    FedDebias has two clients in each domain of PACS: `clients_per_domain=2`. ADCOL divides each source into ten parts
    of which 2, 4, …, 10 take part: `parts=10 clients_per_domain=2` (its other rules are options of the image datasets).

    If domains share leakage groups, test and validation rows are drawn by group, for all domains at once. Otherwise one
    row of each group is divided, and the other rows of the group follow it.
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
        clients = self.clients_per_domain
        if self.parts is not None and self.parts < clients:
            raise UsageError(f"partition.parts={self.parts}: fewer than partition.clients_per_domain={clients}")

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, self.test)

    def draws_tests(self, dataset: Dataset) -> bool | None:
        return bool(self.test)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        strata = self.strata(dataset)
        crosses = _domains_share_groups(dataset)
        pools = self._pools(dataset, strata, crosses=crosses)
        validated = self.given_validation(dataset)
        if validated is None and crosses:
            of_domains = [pool.train for pool in pools.values()]
            train_rows = np.concatenate([np.empty(0, int), *of_domains])
            random = numpy_generator(self.seed, VALIDATION)
            validated = draw_groups(dataset, train_rows, random, 1 - self.drawn_validation)
        clients: list[ClientRows] = []
        for position, pool in pools.items():
            domain = dataset.domains[position]
            trains = self.assign_rows(dataset, pool.train, position)
            tests = self._equal_parts(pool.test)
            for train, test in zip(trains, tests, strict=True):
                clients.append(self.client_rows(len(clients), domain, train, test, validated, strata))
        if crosses:
            return clients
        rows = dataset.rows()
        return [with_groups(dataset, client, rows) for client in clients]

    def assign_rows(self, dataset: Dataset, rows: Rows, position: int) -> list[Rows]:
        """Return each client's training rows, out of the shuffled `rows` of the domain at `position`."""
        return self._equal_parts(rows)

    def _equal_parts(self, rows: Rows) -> list[Rows]:
        """Return the rows of each client of a domain, out of all of them."""
        parts = np.array_split(rows, self.parts or self.clients_per_domain)
        return parts[: self.clients_per_domain]

    def _pools(self, dataset: Dataset, strata: np.ndarray | None, *, crosses: bool) -> dict[int, "Pool"]:
        """Return the rows of each domain that clients may hold, by its position.

        Args:
            dataset, strata: What is divided, and the classes of its rows.
            crosses: Whether domains share leakage groups. If not, each group has its first row alone in a pool.
        """
        pools = {}
        validated = self.given_validation(dataset)
        tested = None
        if crosses and self.test is not None:
            tested = self._drawn_tests(dataset, validated, self.test)
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            if self.test is None:
                pools[position] = self._own_pool(dataset, position, crosses=crosses)
                continue
            rows = _divisible(dataset, dataset.rows(domain=domain), crosses=crosses)
            rows = numpy_generator(self.seed, TEST, position).permutation(rows)
            if tested is None:
                pools[position] = Pool(*without_share(rows, self.test, validated, strata))
            else:
                pools[position] = Pool(*divided(rows, tested))
        return pools

    def _own_pool(self, dataset: Dataset, position: int, *, crosses: bool) -> "Pool":
        """Return the training and test rows of a domain by the dataset's own split."""
        domain = dataset.domains[position]
        train = _divisible(dataset, dataset.rows(is_test=False, domain=domain), crosses=crosses)
        test = _divisible(dataset, dataset.rows(is_test=True, domain=domain), crosses=crosses)
        train = numpy_generator(self.seed, ASSIGNMENT, position, 0).permutation(train)
        test = numpy_generator(self.seed, ASSIGNMENT, position, 1).permutation(test)
        return Pool(train, test)

    def _drawn_tests(self, dataset: Dataset, validated: Mask | None, share: float) -> Mask | None:
        """Return a mask, bool [N], of a `share` of the rows for testing, drawn by leakage group.

        None if every group has one row, so that rows may be drawn individually.
        """
        rows = dataset.rows()
        if validated is not None:
            rows, _ = divided(rows, validated)
        return draw_groups(dataset, rows, numpy_generator(self.seed, TEST), 1 - share)


def _domains_share_groups(dataset: Dataset) -> bool:
    """Return whether a leakage group has rows of several domains."""
    return len(spread_groups(dataset.leakage_group, dataset.domain)) > 0


def _divisible(dataset: Dataset, rows: Rows, *, crosses: bool) -> Rows:
    """Return the first of `rows` in each leakage group, or all `rows` if domains share groups (`crosses`)."""
    if crosses:
        return rows
    return first_of_each_group(dataset, rows)


class Pool(NamedTuple):
    """The shuffled training and test rows of a domain."""

    train: Rows
    test: Rows


MIX = 1  # purpose of a stream of its own, beside the two of Domains with ASSIGNMENT


@dataclass(frozen=True, kw_only=True)
class DomainMixes(Domains):
    """The clients of de Luca et al. 2022 (data augmentation for federated domain generalisation): 12 in 3 domains.

    In a domain with n training rows, each of k clients draws a size ~ Normal(n / (k + 1), `size_sd`²). It also draws a
    class mix ~ Dirichlet(`alpha` x base) over the domain's classes; base sums to 1. One client after the other then
    takes floor(size x mix) rows of each class, or as many as are left. As in the authors' code, a client whose classes
    run out stays smaller, most of all the last one. Therefore more than 1/(k + 1) of the rows remain unused: with k = 4
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

    def assign_rows(self, dataset: Dataset, rows: Rows, position: int) -> list[Rows]:
        clients = self.clients_per_domain
        random = numpy_generator(self.seed, ASSIGNMENT, position, 0, MIX)
        stacks = by_class(dataset, rows)
        available = sizes_of(stacks)
        for _ in range(MAX_DRAWS):
            counts = self._drawn_counts(available, len(rows), random)
            ends = np.minimum(counts.cumsum(0), available)  # nothing is taken of a class that has run out
            starts = np.zeros_like(ends)
            starts[1:] = ends[:-1]
            has_rows = (ends > starts).any(1)
            if has_rows.all():
                return [taken_from(stacks, starts[client], ends[client]) for client in range(clients)]
        domain = dataset.domains[position]
        raise UsageError(
            f"partition.clients_per_domain={clients}: in each of {MAX_DRAWS} draws, a client of domain {domain} got no "
            "row; use fewer clients, or a smaller partition.size_sd"
        )

    def _drawn_counts(self, available: np.ndarray, total: int, random: np.random.Generator) -> np.ndarray:
        """Return how many rows each client takes of each class, int [clients, classes], if there are so many."""
        clients = self.clients_per_domain
        present = available > 0
        base = np.ones(present.sum())
        if self.base == "prior":
            base = available[present]
        mean = total / (clients + 1)
        sizes = random.normal(mean, self.size_sd, clients).clip(0)
        mixes = random.dirichlet(self.alpha * base / base.sum(), clients)
        counts = np.zeros((clients, len(available)), int)
        counts[:, present] = sizes[:, None] * mixes
        return counts


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """One client for each group of classes of a domain; the groups are consecutive and as equal as possible.

    Two groups of seven classes are 0-3 and 4-6 (FedDebias's split of PACS). A client's test part consists of the
    domain's own test examples of its classes. With `test_absent`, it has those of the other classes instead: they show
    how a model treats classes that it never saw. If several clients could receive such an example, one is drawn at
    random.
    """

    groups: int = option(2, low=2, help="number of groups of classes, and thus of clients, in each domain")
    per_client: int | None = option(None, low=1, help="maximum of rows per client, before validation is held out")
    test_absent: bool = option(False, help="test on the classes that the client does not have")

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, None)

    def draws_tests(self, dataset: Dataset) -> bool | None:
        return False

    def split(self, dataset: Dataset) -> list[ClientRows]:
        labels, count = dataset.divided_by()
        groups = np.array_split(np.arange(count), self.groups)
        validated = self.given_validation(dataset)
        strata = self.strata(dataset)
        clients: list[ClientRows] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            train = dataset.rows(is_test=False, domain=domain)
            test = dataset.rows(is_test=True, domain=domain)
            test_groups = self._test_groups(labels[test], groups, position)
            for group, classes in enumerate(groups):
                is_of_group = np.isin(labels[train], classes)
                random = numpy_generator(self.seed, ASSIGNMENT, position, group)
                rows = random.permutation(train[is_of_group])
                tests = test[test_groups == group]
                capped = rows[: self.per_client]
                client = self.client_rows(len(clients), domain, capped, tests, validated, strata)
                clients.append(client)
        return clients

    def _test_groups(self, labels: np.ndarray, groups: list[Rows], position: int) -> np.ndarray:
        """Return the group of classes of the client that gets each test example, [n]."""
        last_classes = [classes[-1] for classes in groups]
        own_group = np.searchsorted(last_classes, labels)
        if not self.test_absent:
            return own_group
        random = numpy_generator(self.seed, TEST, position)
        shift = random.integers(1, self.groups, len(labels))
        return (own_group + shift) % self.groups


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Each client holds the examples that belong to it in the dataset.

    A client's domain is that of its rows; if the dataset has only one domain, each client is a domain of its own.
    One row of each leakage group is divided, and the other rows of the group follow it.
    """

    follows_seed: ClassVar[bool] = False

    test: float | None = option(
        None, low=0, below=1, help=f"{TEST_HELP.format('client')}; null: the dataset's own test examples"
    )

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, self.test)

    def draws_tests(self, dataset: Dataset) -> bool | None:
        return bool(self.test)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        if dataset.client is None:
            raise UsageError(f"partition=natural: {dataset.name} does not define clients; choose domains or iid")
        self._check_groups(dataset, dataset.client)
        rows = dataset.rows()
        owners = dataset.client[rows]
        file_numbers, counts = np.unique(owners, return_counts=True)
        by_client = rows[np.argsort(owners, kind="stable")]
        ends = np.cumsum(counts)
        validated = self.given_validation(dataset)
        strata = self.strata(dataset)
        clients = []
        parts = np.split(by_client, ends[:-1])
        for number, held in enumerate(parts):
            if self.test is None:
                train, test = divided(held, dataset.is_test)
            else:
                firsts = first_of_each_group(dataset, held)
                train, test = self._drawn(firsts, self.test, number, validated, strata)
                train = expand_groups(dataset, train, held)
                test = expand_groups(dataset, test, held)
            domain = self._domain(dataset, held, int(file_numbers[number]))
            firsts = first_of_each_group(dataset, train)
            client = self.client_rows(number, domain, firsts, test, validated, strata)
            fit = expand_groups(dataset, client.train, train)
            val = expand_groups(dataset, client.val, train)
            clients.append(client._replace(train=fit, val=val))
        return clients

    def _check_groups(self, dataset: Dataset, owners: np.ndarray) -> None:
        """Raise UsageError if rows are drawn, and a leakage group has rows of several clients."""
        draws_validation = self.given_validation(dataset) is None and self.drawn_validation > 0
        spread = spread_groups(dataset.leakage_group, owners)
        if not len(spread) or (self.test is None and not draws_validation):
            return
        of_first = np.flatnonzero(dataset.leakage_group == spread[0])
        names = self.names(dataset)[0]
        places = np.searchsorted(np.unique(owners[dataset.rows()]), np.unique(owners[of_first]))
        clients = " and ".join(names[place] for place in places[:2])
        found = f"the group of row {of_first[0]} has rows of {clients}"
        problem = f"{found}, and {len(spread)} groups have rows of several clients"
        raise UsageError(
            f"partition=natural: {problem}; write the client into the group's name if these are not the same patients, "
            "else give each group one client, or all rows a data.split"
        )

    def _domain(self, dataset: Dataset, rows: np.ndarray, client: int) -> str:
        """Return the domain of a client's rows, or the client's own name if all domains are one."""
        if len(dataset.domains) > 1:
            return dataset.domain_of(rows)
        if dataset.client_names is None:
            return f"client-{client}"
        return dataset.client_names[client]

    def names(self, dataset: Dataset) -> list[list[str]]:
        """Return what the dataset calls all clients, in the order of `split`: their names, or else 3 and client-3."""
        assert dataset.client is not None, "split refuses it"
        owners = np.unique(dataset.client[dataset.rows()])
        if dataset.client_names is None:
            numbers = list(map(str, owners.tolist()))
            return [numbers, list(map("client-{}".format, numbers))]
        return [np.array(dataset.client_names)[owners].tolist()]

    def sizes(self, counts: np.ndarray) -> np.ndarray:
        """Return the examples of the training, validation and test parts of clients with `counts` examples [N, 3]."""
        different, places = np.unique(counts, return_inverse=True)
        sizes = np.zeros((len(different), 3), np.int64)
        for place, count in enumerate(different.tolist()):
            train, val, test = self.of_client(0, count)
            sizes[place] = len(train), len(val), len(test)
        return sizes[places]

    def of_client(self, number: int, count: int) -> tuple[Rows, Rows, Rows]:
        """Return the training, validation and test rows of a client with `count` examples and no test set of its own.

        They are those that `split` gives to the client `number`, counted from its first example.
        """
        train = np.arange(count)
        test = train[:0]
        if self.test is not None:
            train, test = self._drawn(train, self.test, number)
        client = self.client_rows(number, "", train, test)
        return client.train, client.val, client.test

    def _drawn(
        self,
        rows: Rows,
        test: float,
        client: int,
        validated: Mask | None = None,
        strata: np.ndarray | None = None,
    ) -> tuple[Rows, Rows]:
        """Return the training rows of a client, and the share `test` of its rows."""
        shuffled = numpy_generator(self.seed, TEST, client).permutation(rows)
        return without_share(shuffled, test, validated, strata)
