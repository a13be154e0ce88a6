"""What partitions share: seed, validation share, how rows are shuffled and held out, and a hash of who holds which."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import floor_share, numpy_generator
from rayfed.data.dataset import (
    ClientRows,
    Dataset,
    Mask,
    Rows,
    cap_rows,
    expand_groups,
    first_of_each_group,
    own_tests,
    own_validation,
)
from rayfed.data.partitions.stratified import stratified

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
    redraw: bool | None = option(
        None,
        help="true: each seed of the run has a split of its own; false: all seeds share one; null: true where the "
        "partition draws who holds what, and false for domains, natural and file",
    )
    stratify: bool | None = option(
        None,
        help="draw test and validation parts with the classes in proportion; null: of your own data, and not of the "
        "datasets that rayfed names, whose splits are published",
    )

    def with_seed(self, seed: int) -> Self:
        """Return the partition with its seed, as `seed` of the run gives it.

        Raises:
            UsageError: A pinned partition is to be drawn anew.
        """
        if self.seed is not None:
            if self.redraw:
                raise UsageError(
                    f"partition.redraw=true: partition.seed={self.seed} gives all seeds one split; give one of them"
                )
            return self
        follows = self.redraw
        if follows is None:
            follows = self.follows_seed
        if follows:
            return replace(self, seed=seed)
        return replace(self, seed=0)

    def draws_tests(self, dataset: Dataset) -> bool | None:
        """Return whether the clients' test examples are drawn from their rows, and not the dataset's own.

        None: not known, as of a partition of the user's own that does not say it.
        """
        return None

    def check_redraw(self, dataset: Dataset) -> None:
        """Raise UsageError if each seed is to have a split of its own, and the test examples are always the same."""
        if self.redraw and not self.follows_seed and self.draws_tests(dataset) is False:
            raise UsageError(
                f"partition.redraw=true: {dataset.name} has test examples of its own, which no seed draws; give "
                "partition.test, such as 0.25, to draw test examples from all, or leave redraw out"
            )

    def strata(self, dataset: Dataset) -> np.ndarray | None:
        """Return the classes, int64 [N], in whose proportions parts are drawn; None: regardless of classes.

        Raises:
            UsageError: Parts are to be stratified, and labels are no classes, or rows of a leakage group stay together.
        """
        if self.stratify and not dataset.has_classes:
            form = f"{dataset.labels.dtype} {list(dataset.labels.shape)}"
            raise UsageError(f"partition.stratify=true: the labels of {dataset.name} are {form}, and no classes")
        stratifies = self.stratify
        if stratifies is None:
            stratifies = dataset.stratified
        if not stratifies or not dataset.has_classes:
            return None
        return dataset.labels

    @property
    def drawn_validation(self) -> float:
        """The share of a training part that is kept for validation where no validation examples are given."""
        if self.validation is None:
            return VALIDATION_SHARE
        return self.validation

    def test_source(self, dataset: Dataset) -> str:
        """Return on which examples clients are tested, as the end of a sentence; empty: not known."""
        return ""

    def given_validation(self, dataset: Dataset) -> Mask | None:
        """Return a mask, bool [N], of the validation examples that the dataset gives; None: they are drawn."""
        if self.validation is not None:
            return None
        return own_validation(dataset)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        """Return one `ClientRows` per client, with ids 0..N-1 in order; no row is used twice.

        Raises:
            UsageError: The dataset cannot be divided like this.
        """
        raise NotImplementedError

    def client_rows(
        self,
        client: int,
        domain: str,
        train: Rows,
        test: Rows,
        validated: Mask | None = None,
        strata: np.ndarray | None = None,
    ) -> ClientRows:
        """Return a client's rows, with the validation part taken from `train` and the rest shuffled.

        Args:
            client, domain: The client's number and domain.
            train, test: Its rows of the dataset.
            validated: The rows to use for validation, bool [N], such as `given_validation`; None: they are drawn.
            strata: What `strata` returns: the classes in whose proportions they are drawn.
        """
        order = numpy_generator(self.seed, VALIDATION, client).permutation(train)
        if validated is not None:
            train, val = divided(order, validated)
            return ClientRows(client, domain, train, val, test)
        count = floor_share(len(train), self.drawn_validation)
        if strata is None:
            val, train = np.split(order, [count])
        else:
            train, val = divided_at(order, stratified(order, count, strata))
        return ClientRows(client, domain, train, val, test)


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

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        """Return the rows of each client, in an order in which any prefix is a fair sample."""
        raise NotImplementedError

    def split(self, dataset: Dataset) -> list[ClientRows]:
        rows = dataset.rows()
        if self.common_test:
            rows = dataset.rows(is_test=False)
        common_tests = self._common_tests(dataset)
        share = self._drawn_share(dataset)
        tested = own_tests(dataset)
        validated = self.given_validation(dataset)
        strata = self.strata(dataset)
        clients = []
        for client, assigned in enumerate(self.assign_rows(dataset, first_of_each_group(dataset, rows))):
            capped = cap_rows(dataset, assigned, rows, self.per_client)
            shuffled = numpy_generator(self.seed, TEST, client).permutation(capped)
            domain = dataset.domain_of(expand_groups(dataset, shuffled, rows))
            if self.common_test:
                train, test = np.split(shuffled, [len(shuffled)])
            elif share is None:
                train, test = divided(shuffled, tested)
            else:
                train, test = without_share(shuffled, share, validated, strata)
            held = self.client_rows(client, domain, train, test, validated, strata)
            clients.append(with_groups(dataset, held, rows))
        if common_tests:
            clients = [held._replace(test=own) for held, own in zip(clients, common_tests, strict=True)]
        return clients

    def _common_tests(self, dataset: Dataset) -> list[Rows]:
        """Return equal shares of the dataset's own test examples; none without `common_test`.

        Raises:
            UsageError: There are fewer than clients.
        """
        if not self.common_test:
            return []
        tests = numpy_generator(self.seed, TEST).permutation(dataset.rows(is_test=True))
        if len(tests) < self.clients:
            raise UsageError(f"partition.common_test=true: {dataset.name} has {len(tests)} test examples of its own")
        return np.array_split(tests, self.clients)

    def test_source(self, dataset: Dataset) -> str:
        if self.common_test:
            return "tested on equal shares of the dataset's own test examples"
        return describe_tests(dataset, self._drawn_share(dataset))

    def draws_tests(self, dataset: Dataset) -> bool | None:
        return bool(self._drawn_share(dataset)) and not self.common_test

    def _drawn_share(self, dataset: Dataset) -> float | None:
        """Return the share of a client's rows that is drawn for testing; None: its tests are the dataset's own."""
        if self.test is None and not _has_tests(dataset):
            return 0.25
        return self.test


def divided(rows: Rows, marked: Mask) -> tuple[Rows, Rows]:
    """Return the `rows` that the mask `marked`, bool [N], does not have, and those that it has, both in order."""
    return divided_at(rows, marked[rows])


def divided_at(rows: Rows, is_marked: Mask) -> tuple[Rows, Rows]:
    """Return the `rows` [n] without a mark, and those with one, both in order; `is_marked` is a mask [n] of them."""
    return rows[~is_marked], rows[is_marked]


def with_groups(dataset: Dataset, client: ClientRows, among: Rows) -> ClientRows:
    """Return a client with all rows of `among` in the leakage groups of its rows."""
    train = expand_groups(dataset, client.train, among)
    val = expand_groups(dataset, client.val, among)
    test = expand_groups(dataset, client.test, among)
    return client._replace(train=train, val=val, test=test)


def without_share(
    rows: Rows, share: float, validated: Mask | None = None, strata: np.ndarray | None = None
) -> tuple[Rows, Rows]:
    """Return shuffled `rows` without a share, rounded up, and that share.

    Args:
        rows: Rows of a dataset.
        share: The share of them that is drawn.
        validated: Rows that are never drawn and do not count, bool [N].
        strata: The classes, int64 [N], in whose proportions rows are drawn; None: the last ones are drawn.
    """
    if validated is not None:
        others, val = divided(rows, validated)
        train, test = without_share(others, share, None, strata)
        return np.concatenate([train, val]), test
    count = floor_share(len(rows), 1 - share)
    if strata is None:
        return rows[:count], rows[count:]
    return divided_at(rows, stratified(rows, len(rows) - count, strata))


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
    if share:
        pooled = ""
        if dataset.leakage_group is not None:
            pooled = ", in whole groups"
        if has_tests:
            pooled += ", drawn from its training and test examples together"
        return f"tested on {share:g} of their rows{pooled}"
    if not has_tests:
        return "no test examples"
    if share is None:
        return "tested on the dataset's own test examples"
    return "trained on its test examples, too"


def _has_tests(dataset: Dataset) -> bool:
    return bool(dataset.is_test[dataset.rows()].any())


def by_class(dataset: Dataset, rows: Rows) -> list[Rows]:
    """Return `rows` separated by their class or stratum 0..C-1, each in the given order."""
    labels, count = dataset.divided_by()
    of_rows = labels[rows]
    return [rows[of_rows == label] for label in range(count)]


def sizes_of(stacks: Sequence[Rows]) -> np.ndarray:
    """Return the number of rows in each of `stacks`, int64 [len(stacks)]."""
    return np.array(list(map(len, stacks)), np.int64)


def joined(piles: Sequence[Sequence[Rows]]) -> list[Rows]:
    """Return the rows of each client, who has several piles of them."""
    return list(map(np.concatenate, piles))


def shuffled(stacks: Sequence[Rows], random: np.random.Generator) -> list[Rows]:
    """Return each of `stacks` in a random order, drawn one after the other."""
    return list(map(random.permutation, stacks))


def taken_from(stacks: Sequence[Rows], starts: np.ndarray, ends: np.ndarray) -> Rows:
    """Return the rows between a start and an end in each of `stacks`, one after the other."""
    taken = []
    for stack, i, j in zip(stacks, starts, ends, strict=True):
        taken.append(stack[i:j])
    return np.concatenate(taken)


def draw_until(draw: Callable[[], list[Rows]], least: int, *, keys: str) -> list[Rows]:
    """Repeat `draw` until every client has `least` rows, and return the rows of each client.

    Raises:
        UsageError: No draw out of `MAX_DRAWS` gave every client that many rows; the message starts with the options
            `keys`.
    """
    best = 0
    short = []
    for _ in range(MAX_DRAWS):
        rows = draw()
        sizes = sizes_of(rows)
        smallest = int(sizes.min())
        if smallest >= least:
            return rows
        best = max(best, smallest)
        short.append(int((sizes < least).sum()))
    found = f"{min(short)} to {max(short)} of {len(rows)} clients had fewer than min_size={least} examples"
    raise UsageError(
        f"{keys}: in {MAX_DRAWS} draws, {found} (the smallest at most {best}); raise alpha, lower min_size or use "
        "fewer clients"
    )


def check_min_size(least: int, clients: int, dataset: Dataset, rows: Rows) -> None:
    """Raise UsageError if no division of `rows` gives every client `least` of them (`partition.min_size`)."""
    needed = least * clients
    if needed > len(rows):
        needs = f"{clients} clients would need {needed} examples, {dataset.name} has {len(rows)}"
        raise UsageError(f"partition.min_size={least}: {needs}")


def partition_hash(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a hash of client, split, source and index of all rows, regardless of their order; 12 hexadecimal digits.

    A partition and its file have the same hash, on every machine. The contents of the rows, and test sets that no
    client holds, do not count: they follow from the options of the dataset.
    """
    rows, client, split = columns_of(clients)
    source = dataset.source[rows]
    index = dataset.index[rows]
    order = np.lexsort((index, source, split, client))
    digest = hashlib.blake2b("|".join(dataset.sources).encode(), digest_size=6)
    for column in (client, split, source, index):
        values = column[order].astype("<i8")
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def columns_of(clients: list[ClientRows]) -> tuple[Rows, np.ndarray, np.ndarray]:
    """Return the rows that clients hold, and for each row the numbers of its client and split."""
    rows = []
    numbers = []
    splits = []
    for client in clients:
        for split, part in enumerate((client.train, client.val, client.test)):
            rows.append(part)
            numbers.append(np.full(len(part), client.id))
            splits.append(np.full(len(part), split))
    all_rows = np.concatenate(rows).astype(np.int64)
    return all_rows, np.concatenate(numbers), np.concatenate(splits)
