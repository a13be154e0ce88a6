"""Feature skew with some label skew: several clients per domain, with different sizes and class mixes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, MAX_DRAWS, by_class
from rayfed.data.partitions.domains import Domains

MIX = 1  # purpose of a stream of its own, beside the two of Domains with ASSIGNMENT


@dataclass(frozen=True, kw_only=True)
class DomainMixes(Domains):
    """The clients of de Luca et al. 2022 (data augmentation for federated domain generalisation): 12 of 3 domains.

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
            f"{dataset.domains[position]} got none of its {len(rows)} rows; use fewer clients, or a smaller "
            "partition.size_sd"
        )
