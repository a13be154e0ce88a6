"""Partitions by domain, at random, and as the dataset itself has it."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset, Part
from rayfed.data.partition import DEAL, Partition, Pooled, generator
from rayfed.errors import UsageError
from rayfed.options import option


@dataclass(frozen=True, kw_only=True)
class Domains(Partition):
    """One client per domain, or several that share it equally; the dataset's own test examples stay test examples."""

    clients_per_domain: int = option(1, low=1, help="clients that share a domain's rows at random, in equal parts")

    def split(self, dataset: Dataset) -> list[Part]:
        parts: list[Part] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            shares = []
            for is_test in (False, True):
                rows = dataset.rows(is_test=is_test, domain=domain)
                shuffled = generator(self.seed, DEAL, position, int(is_test)).permutation(rows)
                shares.append(np.array_split(shuffled, self.clients_per_domain))
            for train, test in zip(*shares, strict=True):
                if not len(train):
                    count = len(dataset.rows(is_test=False, domain=domain))
                    raise UsageError(
                        f"partition.clients_per_domain={self.clients_per_domain}: "
                        f"domain {domain} of {dataset.name} has only {count} training samples"
                    )
                parts.append(self.part(len(parts), domain, train, test))
        return parts


@dataclass(frozen=True, kw_only=True)
class Iid(Pooled):
    """Every client gets an equal random share of all rows."""

    def deal(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(generator(self.seed, DEAL).permutation(rows), self.clients)


@dataclass(frozen=True, kw_only=True)
class Natural(Partition):
    """Each client holds what the dataset says is its own, and is a domain of its own."""

    def split(self, dataset: Dataset) -> list[Part]:
        if dataset.client is None:
            raise UsageError(
                f"partition=natural: {dataset.name} does not say whose its samples are; "
                "choose domains, iid or dirichlet"
            )
        rows = dataset.rows()
        originals = np.unique(dataset.client[rows])
        owner, is_test = dataset.client[rows], dataset.is_test[rows]
        empty = [int(original) for original in originals if not ((owner == original) & ~is_test).any()]
        if empty:
            count = int((owner == empty[0]).sum())
            raise UsageError(
                f"partition=natural: client {empty[0]} of {dataset.name} has no training samples "
                f"({count} test samples only); leave it out with data.drop_clients={empty}"
            )
        parts = []
        for number, original in enumerate(originals):
            own = owner == original
            parts.append(self.part(number, f"client-{original}", rows[own & ~is_test], rows[own & is_test]))
        return parts
