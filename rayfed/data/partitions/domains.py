"""A client for every domain, or several that share it: feature skew alone."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset, Part
from rayfed.data.partition import DEAL, TEST, Partition, generator, share
from rayfed.errors import UsageError
from rayfed.options import option


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """One client per domain, or several that share it equally; the dataset's own test examples stay test examples.

    FedDebias has two clients in each domain of PACS: `clients_per_domain=2`. ADCOL divides each source into ten parts
    of which 2, 4, …, 10 take part: `parts=10 clients_per_domain=2` (its other rules are options of the image sets).
    """

    clients_per_domain: int = option(1, low=1, help="clients that share a domain's rows at random, in equal parts")
    parts: int | None = option(
        None, low=1, help="equal parts that a domain is divided into, one for each client; null: clients_per_domain"
    )
    test: float | None = option(
        None,
        low=0,
        below=1,
        help="share of each domain's rows, at random, that is for testing, rounded up; null: the dataset's own",
    )

    def __post_init__(self) -> None:
        if self.parts is not None and self.parts < self.clients_per_domain:
            raise UsageError(
                f"partition.parts={self.parts}: fewer than partition.clients_per_domain={self.clients_per_domain}"
            )

    def split(self, dataset: Dataset) -> list[Part]:
        made: list[Part] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            train, test = self._pools(dataset, position)
            for own, tests in zip(self.deal(dataset, train, position), self._equally(test), strict=True):
                if not len(own):
                    raise UsageError(
                        f"partition.clients_per_domain={self.clients_per_domain}: "
                        f"domain {domain} of {dataset.name} has only {len(train)} training samples"
                    )
                made.append(self.part(len(made), domain, own, tests))
        return made

    def deal(self, dataset: Dataset, rows: np.ndarray, position: int) -> list[np.ndarray]:
        """The training rows of each client of the domain at `position`, out of its `rows`, which are shuffled."""
        return self._equally(rows)

    def _equally(self, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(rows, self.parts or self.clients_per_domain)[: self.clients_per_domain]

    def _pools(self, dataset: Dataset, position: int) -> tuple[np.ndarray, np.ndarray]:
        """A domain's rows for training and for testing, shuffled."""
        domain = dataset.domains[position]
        if self.test is None:
            train, test = (dataset.rows(is_test=is_test, domain=domain) for is_test in (False, True))
            return self._shuffled(train, position, 0), self._shuffled(test, position, 1)
        rows = generator(self.seed, TEST, position).permutation(dataset.rows(domain=domain))
        training = share(len(rows), 1 - self.test)
        return rows[:training], rows[training:]

    def _shuffled(self, rows: np.ndarray, *purpose: int) -> np.ndarray:
        return generator(self.seed, DEAL, *purpose).permutation(rows)
