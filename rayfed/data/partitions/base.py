"""What partitions share: seed, validation share, how rows are shuffled and held out, and a hash of who holds which."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import floor_share, numpy_generator
from rayfed.data.dataset import (
    ClientRows,
    Dataset,
    cap_rows,
    expand_groups,
    first_of_each_group,
    own_tests,
    own_validation,
)
from rayfed.data.population import SPLITS

ASSIGNMENT, TEST, VALIDATION = range(3)  # purposes of a seed's random streams: draws for one do not shift another's
TEST_HELP = "share of each {}'s rows drawn for testing, rounded up"
VALIDATION_SHARE = 0.1  # of a client's training part, where the dataset has no validation examples of its own
MAX_DRAWS = 1000  # attempts after which a partition with a minimum size gives up


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Assigns the rows of a dataset to clients. The same dataset, options and seed always give the same rows.

    Attributes:
        follows_seed: Whether a seed of null stands for the seed of the run, because the partition draws at random who
            holds what. Otherwise it stands for 0: a published split and a division by domain stay the same, and only
            validation parts are drawn, where the data have none.
    """

    follows_seed: ClassVar[bool] = True

    seed: int | None = option(
        None,
        low=0,
        help="seed of all draws of the partition; null: that of the run, or 0 where the data say who holds what "
        "(domains, natural, file)",
    )
    validation: float | None = option(
        None,
        low=0,
        below=1,
        help="share of each client's training part that is kept for validation, rounded down; null: the dataset's own "
        f"validation examples, else {VALIDATION_SHARE}",
    )

    @property
    def drawn_validation(self) -> float:
        """The share of a training part that is kept for validation where no validation examples are given."""
        return VALIDATION_SHARE if self.validation is None else self.validation

    def test_source(self, dataset: Dataset) -> str:
        """Return on which examples clients are tested, as the end of a sentence; empty: not known."""
        return ""

    def given_validation(self, dataset: Dataset) -> np.ndarray | None:
        """Return a mask, bool [N], of the validation examples that the dataset gives; None: they are drawn."""
        return own_validation(dataset) if self.validation is None else None

    def split(self, dataset: Dataset) -> list[ClientRows]:
        """Return one `ClientRows` per client, with ids 0..N-1 in order; no row is used twice.

        Raises:
            UsageError: The dataset cannot be divided like this.
        """
        raise NotImplementedError

    def client_rows(
        self, client: int, domain: str, train: np.ndarray, test: np.ndarray, validated: np.ndarray | None = None
    ) -> ClientRows:
        """Return a client's rows, with the validation part taken from `train` and the rest shuffled.

        `validated` is a mask of the rows to use for validation, bool [N], such as `given_validation`; None: they are
        drawn.
        """
        order = numpy_generator(self.seed, VALIDATION, client).permutation(train)
        if validated is not None:
            return ClientRows(client, domain, order[~validated[order]], order[validated[order]], test)
        count = floor_share(len(train), self.drawn_validation)
        return ClientRows(client, domain, order[count:], order[:count], test)


@dataclass(frozen=True, kw_only=True)
class PooledPartition(Partition):
    """Assigns all rows, including the dataset's own test examples, to clients.

    Each client is tested on those of its rows that are test examples of the dataset. If `test` is given, or the dataset
    has no test examples, each client divides its rows at random instead. One row of each leakage group is assigned and
    divided, and the other rows of the group follow it.

    With `common_test`, only the training examples are assigned. The dataset's own test examples become the clients'
    test parts, at random and in equal numbers, so that all models are tested on all classes.
    """

    clients: int = option(20, low=1, high=1_000_000, help="number of clients")
    test: float | None = option(
        None, low=0, below=1, help=f"{TEST_HELP.format('client')}; null: the dataset's own test examples, else 0.25"
    )
    per_client: int | None = option(None, low=1, help="maximum of rows per client, before they are split")
    common_test: bool = option(False, help="test on equal shares of the dataset's own test examples instead of `test`")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        """Return the rows of each client, in an order in which any prefix is a fair sample."""
        raise NotImplementedError

    def split(self, dataset: Dataset) -> list[ClientRows]:
        rows = dataset.rows(is_test=False if self.common_test else None)
        common_tests = None
        if self.common_test:
            tests = numpy_generator(self.seed, TEST).permutation(dataset.rows(is_test=True))
            if len(tests) < self.clients:
                raise UsageError(f"partition.common_test=true: {dataset.name} has {len(tests)} test samples of its own")
            common_tests = np.array_split(tests, self.clients)
        share, tested, validated = self._drawn_share(dataset), own_tests(dataset), self.given_validation(dataset)
        clients = []
        for client, assigned in enumerate(self.assign_rows(dataset, first_of_each_group(dataset, rows))):
            capped = cap_rows(dataset, assigned, rows, self.per_client)
            shuffled = numpy_generator(self.seed, TEST, client).permutation(capped)
            domain = dataset.domain_of(expand_groups(dataset, shuffled, rows))
            if common_tests is not None:
                train, test = shuffled, shuffled[:0]
            elif share is None:
                train, test = shuffled[~tested[shuffled]], shuffled[tested[shuffled]]
            else:
                train, test = without_share(shuffled, share, validated)
            parts = self.client_rows(client, domain, train, test, validated)[2:]
            held = ClientRows(client, domain, *(expand_groups(dataset, part, rows) for part in parts))
            clients.append(held if common_tests is None else held._replace(test=common_tests[client]))
        return clients

    def test_source(self, dataset: Dataset) -> str:
        if self.common_test:
            return "tested on equal shares of the dataset's own test examples"
        return describe_tests(dataset, self._drawn_share(dataset))

    def _drawn_share(self, dataset: Dataset) -> float | None:
        """Return the share of a client's rows that is drawn for testing; None: its tests are the dataset's own."""
        return 0.25 if self.test is None and not _has_tests(dataset) else self.test


def without_share(rows: np.ndarray, share: float, validated: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return `rows` without a share at their end, rounded up, and that share.

    Rows that `validated` marks, bool [N], are never in it and do not count.
    """
    if validated is None:
        count = floor_share(len(rows), 1 - share)
        return rows[:count], rows[count:]
    train, test = without_share(rows[~validated[rows]], share)
    return np.concatenate([train, rows[validated[rows]]]), test


def describe_validation(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return what becomes of the dataset's own validation examples, as the end of a sentence; empty: it has none."""
    own = own_validation(dataset)
    if own is None:
        return ""
    trained = sum(int(own[client.train].sum()) for client in clients)
    if trained:
        return f"trained on {trained:,} of the dataset's own validation examples"
    return "validated on the dataset's own validation examples"


def describe_tests(dataset: Dataset, share: float | None) -> str:
    """Return on which examples clients are tested, by the share of their rows that is drawn; None: its own."""
    has_tests = _has_tests(dataset)
    if not share:
        if has_tests:
            return "tested on the dataset's own test examples" if share is None else "trained on its test examples, too"
        return "no test examples"
    return f"tested on {share:g} of their rows{', drawn from its training and test examples together' * has_tests}"


def _has_tests(dataset: Dataset) -> bool:
    return bool(dataset.is_test[dataset.rows()].any())


def by_class(dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
    """Return `rows` separated by their class or stratum 0..C-1, each in the given order."""
    labels, count = dataset.divided_by()
    return [rows[labels[rows] == label] for label in range(count)]


def draw_until(draw: Callable[[], list[np.ndarray]], least: int, *, keys: str) -> list[np.ndarray]:
    """Repeat `draw` until every client has `least` rows, and return the rows of each client.

    Raises:
        UsageError: No draw out of `MAX_DRAWS` gave every client that many rows; the message starts with the options
            `keys`.
    """
    best, short = 0, list[int]()
    for _ in range(MAX_DRAWS):
        rows = draw()
        sizes = [len(held) for held in rows]
        if min(sizes) >= least:
            return rows
        best = max(best, min(sizes))
        short.append(sum(size < least for size in sizes))
    raise UsageError(
        f"{keys}: in {MAX_DRAWS} draws, {min(short)} to {max(short)} of {len(rows)} clients had fewer than "
        f"min_size={least} samples (the smallest at most {best}); raise alpha, lower min_size or use fewer clients"
    )


def check_min_size(least: int, clients: int, dataset: Dataset, rows: np.ndarray) -> None:
    """Raise UsageError if no division of `rows` gives every client `least` of them (`partition.min_size`)."""
    if (needed := least * clients) > len(rows):
        needs = f"{clients} clients would need {needed} samples, {dataset.name} has {len(rows)}"
        raise UsageError(f"partition.min_size={least}: {needs}")


def partition_hash(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a hash of client, split, source and index of all rows, regardless of their order; 12 hexadecimal digits.

    A partition and its file have the same hash, on every machine. The contents of the rows, and test sets that no
    client holds, do not count: they follow from the options of the dataset.
    """
    rows, client, split = columns_of(clients)
    source, index = dataset.source[rows].astype("<i8"), dataset.index[rows].astype("<i8")
    order = np.lexsort((index, source, split, client))
    digest = hashlib.blake2b("|".join(dataset.sources).encode(), digest_size=6)
    for column in (client, split, source, index):
        digest.update(np.ascontiguousarray(column[order].astype("<i8")).data)
    return digest.hexdigest()


def columns_of(clients: list[ClientRows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that clients hold, and for each row the numbers of its client and split."""
    pieces = [rows for client in clients for rows in client[2:]]
    sizes = [len(rows) for rows in pieces]
    rows = np.concatenate(pieces).astype(np.int64)
    numbers = np.repeat(np.repeat([client.id for client in clients], len(SPLITS)), sizes)
    return rows, numbers, np.repeat(np.tile(np.arange(len(SPLITS)), len(clients)), sizes)
