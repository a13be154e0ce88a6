"""The clients that the dataset itself defines, such as the writers of letters or the wearers of sensors."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import floor_share, numpy_generator
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.partitions.base import TEST, TEST_HELP, Partition, describe_tests


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
            remedy = "choose domains, iid or dirichlet"
            raise UsageError(f"partition=natural: {dataset.name} does not define clients; {remedy}")
        rows = dataset.rows()
        file_numbers, counts = np.unique(dataset.client[rows], return_counts=True)
        by_client = rows[np.argsort(dataset.client[rows], kind="stable")]
        clients, empty = [], []
        for number, held in enumerate(np.split(by_client, np.cumsum(counts)[:-1])):
            if self.test is None:
                train, test = held[~dataset.is_test[held]], held[dataset.is_test[held]]
            else:
                train, test = self._drawn(held, self.test, number)
            domain = dataset.domain_of(held) if len(dataset.domains) > 1 else f"client-{file_numbers[number]}"
            clients.append(self.client_rows(number, domain, train, test))
            empty += [] if len(train) else [number]
        if empty:
            drop = [int(file_numbers[number]) for number in empty]
            raise UsageError(
                f"partition=natural: client {drop[0]} of {dataset.name} has no training samples "
                f"({len(clients[empty[0]].test)} test samples only); drop it, if the dataset has the option, with "
                f"data.drop_clients={drop}, or draw test examples from all rows, as with partition.test=0.25"
            )
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

    def _drawn(self, rows: np.ndarray, test: float, client: int) -> tuple[np.ndarray, np.ndarray]:
        shuffled = numpy_generator(self.seed, TEST, client).permutation(rows)
        count = floor_share(len(rows), 1 - test)
        return shuffled[:count], shuffled[count:]
