"""What all partitions share: the seed, the validation share, and how rows are shuffled and held out."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.draws import floor_share, numpy_generator
from rayfed.data.leakage_groups import cap_rows, expand_groups, first_of_each_group

# The purposes that a partition's seed serves; each has its own stream, so that one draw cannot shift another.
ASSIGNMENT, TEST, VALIDATION = range(3)
MAX_DRAWS = 1000  # after so many draws that will not do, a partition gives up


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Gives the rows of a dataset to clients; the same dataset, options and seed give the same rows for ever."""

    seed: int = option(0, low=0, help="of every draw that the partition makes")
    validation: float = option(
        0.1, low=0, below=1, help="share of each client's training part kept for validation, rounded down"
    )

    def split(self, dataset: Dataset) -> list[ClientRows]:
        """One `ClientRows` per client, ids 0..N-1 in order; no row is in two parts.

        Raises:
            UsageError: the dataset cannot be divided in this way.
        """
        raise NotImplementedError

    def client_rows(
        self, client: int, domain: str, train: np.ndarray, test: np.ndarray, validated: np.ndarray | None = None
    ) -> ClientRows:
        """A client whose validation part is drawn from `train`; the rest comes back shuffled.

        `validated`, bool for each row of the dataset, says instead which rows are for validation.
        """
        order = numpy_generator(self.seed, VALIDATION, client).permutation(train)
        if validated is not None:
            return ClientRows(client, domain, order[~validated[order]], order[validated[order]], test)
        held = floor_share(len(train), self.validation)
        return ClientRows(client, domain, order[held:], order[:held], test)


@dataclass(frozen=True, kw_only=True)
class PooledPartition(Partition):
    """All rows, the dataset's own test examples among them, dealt to clients; each splits its share by itself.

    Of rows that show the same original one is dealt and split, and the others go where it goes.

    With `common_test` only the rest of the rows is dealt, and the dataset's own test examples, shared out at random and
    in equal numbers, are the clients' test parts: each model is tested on all classes alike.
    """

    clients: int = option(20, low=1, help="how many clients")
    test: float = option(0.25, low=0, below=1, help="share of each client's rows that is its test part, rounded up")
    per_client: int | None = option(None, low=1, help="at most so many rows per client, before they are split")
    common_test: bool = option(False, help="test on shares of the dataset's own test examples, in place of `test`")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of each client, in an order that may be cut anywhere."""
        raise NotImplementedError

    def split(self, dataset: Dataset) -> list[ClientRows]:
        rows = dataset.rows(is_test=False if self.common_test else None)
        if self.clients > len(rows):
            raise UsageError(f"partition.clients={self.clients}: more than the {len(rows)} samples of {dataset.name}")
        shares = self._common(dataset) if self.common_test else None
        parts = []
        for client, dealt in enumerate(self.assign_rows(dataset, first_of_each_group(dataset, rows))):
            own = numpy_generator(self.seed, TEST, client).permutation(cap_rows(dataset, dealt, rows, self.per_client))
            domain = dataset.domain_of(expand_groups(dataset, own, rows))
            if shares is not None:
                part = self.client_rows(client, domain, own, own[:0])
                parts.append(_whole(dataset, part, rows)._replace(test=shares[client]))
                continue
            training = floor_share(len(own), 1 - self.test)
            if training == 0:
                raise UsageError(
                    f"partition.clients={self.clients}: client {client} gets {len(own)} samples of {dataset.name}, "
                    f"none to train on after partition.test={self.test}; fewer clients or a smaller test share"
                )
            parts.append(_whole(dataset, self.client_rows(client, domain, own[:training], own[training:]), rows))
        return parts

    def _common(self, dataset: Dataset) -> list[np.ndarray]:
        tests = dataset.rows(is_test=True)
        if len(tests) < self.clients:
            raise UsageError(
                f"partition.common_test=true: {dataset.name} has {len(tests)} test samples of its own for "
                f"{self.clients} clients"
            )
        return np.array_split(numpy_generator(self.seed, TEST).permutation(tests), self.clients)


def _whole(dataset: Dataset, part: ClientRows, rows: np.ndarray) -> ClientRows:
    """`part` with all versions, among `rows`, of the originals that it holds."""
    return ClientRows(part.id, part.domain, *(expand_groups(dataset, own, rows) for own in part[2:]))


def by_class(dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
    """`rows` of each class 0..C-1, in their order."""
    labels = dataset.labels[rows]
    return [rows[labels == label] for label in range(dataset.num_classes)]


def draw_until(draw: Callable[[], list[np.ndarray]], least: int, *, keys: str, remedy: str) -> list[np.ndarray]:
    """The first draw in which every client has `least` rows; `keys` and `remedy` are for the message if none has."""
    best = 0
    for _ in range(MAX_DRAWS):
        dealt = draw()
        if (smallest := min(map(len, dealt))) >= least:
            return dealt
        best = max(best, smallest)
    raise UsageError(
        f"{keys}: in {MAX_DRAWS} draws for {len(dealt)} clients the smallest had at most {best} samples, "
        f"fewer than min_size={least}; {remedy}"
    )


def check_min_size(least: int, clients: int, dataset: Dataset, rows: np.ndarray) -> None:
    """Refuses a `partition.min_size` that no division of `rows` can give."""
    if least * clients > len(rows):
        raise UsageError(
            f"partition.min_size={least}: {clients} clients would need {least * clients} samples, "
            f"{dataset.name} has {len(rows)}"
        )
