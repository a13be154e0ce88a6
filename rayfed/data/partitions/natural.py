"""Clients as the dataset itself has them: the writers of letters, the wearers of sensors."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.draws import floor_share, numpy_generator
from rayfed.data.partitions.base import TEST, Partition


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Each client holds what the dataset says is its own.

    Its domain is that of its rows; where the dataset knows of one domain only, each client is a domain of its own.
    """

    test: float | None = option(
        None,
        low=0,
        below=1,
        help="share of each client's rows that is its test part, rounded up; null: the dataset's own test examples",
    )

    def split(self, dataset: Dataset) -> list[ClientRows]:
        if dataset.client is None:
            raise UsageError(
                f"partition=natural: {dataset.name} does not say whose its samples are; "
                "choose domains, iid or dirichlet"
            )
        rows = dataset.rows()
        originals, owner = np.unique(dataset.client[rows], return_inverse=True)
        pairs = [self._divide(dataset, rows[owner == number], number) for number in range(len(originals))]
        empty = [number for number, (train, _) in enumerate(pairs) if not len(train)]
        if empty:
            drop = [int(originals[number]) for number in empty]
            count = len(pairs[empty[0]][1])
            raise UsageError(
                f"partition=natural: client {drop[0]} of {dataset.name} has no training samples "
                f"({count} test samples only); leave it out, where there is the option with data.drop_clients={drop}"
            )
        return [
            self.client_rows(number, self._domain(dataset, rows[owner == number], originals[number]), *pair)
            for number, pair in enumerate(pairs)
        ]

    def _domain(self, dataset: Dataset, own: np.ndarray, original: int) -> str:
        return dataset.domain_of(own) if len(dataset.domains) > 1 else f"client-{original}"

    def _divide(self, dataset: Dataset, own: np.ndarray, client: int) -> tuple[np.ndarray, np.ndarray]:
        if self.test is None:
            return own[~dataset.is_test[own]], own[dataset.is_test[own]]
        shuffled = numpy_generator(self.seed, TEST, client).permutation(own)
        training = floor_share(len(own), 1 - self.test)
        return shuffled[:training], shuffled[training:]
