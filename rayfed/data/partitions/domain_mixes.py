"""Several clients in every domain, of different sizes and class mixes: feature skew and some label skew."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, MAX_DRAWS, by_class
from rayfed.data.partitions.domains import Domains

MIX = 1  # the purpose of the stream, beside the two that Domains draws from with ASSIGNMENT


@dataclass(frozen=True, kw_only=True)
class DomainMixes(Domains):
    """The clients of de Luca et al. 2022 (data augmentation for federated domain generalisation): 12 of 3 domains.

    In a domain with n training rows, k clients want sizes ~ Normal(n / (k + 1), `size_sd`²) and class mixes
    ~ Dirichlet(`alpha` x base) over the domain's classes, base summing to 1; of each class the clients, one after the
    other, take the whole part of size x mix, or what is left of it. As in the authors' code, a client whose classes run
    out stays smaller, the last one most of all. So more than 1/(k + 1) of the rows is left: with k = 4 about 24% in
    PACS's domains, and 33% in ones of 65 classes as uneven as OfficeHome's.
    """

    clients_per_domain: int = option(4, low=1, help="clients of a domain")
    alpha: float = option(200.0, above=0, help="concentration, the sum over all classes")
    base: str = option("ones", choices=("ones", "prior"), help="mixes around equal classes, or the domain's own mix")
    size_sd: float = option(100.0, low=0, help="standard deviation of a client's size, in rows")

    def __post_init__(self) -> None:
        if self.parts is not None:
            raise UsageError(f"partition.parts={self.parts}: sizes are drawn here; leave it out")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray, position: int) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT, position, 0, MIX)
        stacks = by_class(dataset, rows)
        left = np.array([len(stack) for stack in stacks])
        present, clients = left > 0, self.clients_per_domain
        base = left[present] if self.base == "prior" else np.ones(present.sum())
        for _ in range(MAX_DRAWS):
            sizes = random.normal(len(rows) / (clients + 1), self.size_sd, clients).clip(0)
            wanted = np.zeros((clients, len(left)), int)
            wanted[:, present] = sizes[:, None] * random.dirichlet(self.alpha * base / base.sum(), clients)
            ends = np.minimum(wanted.cumsum(0), left)  # where a class has run out, nothing is left to take
            begins = np.vstack([np.zeros_like(left), ends[:-1]])
            if (ends > begins).any(1).all():
                return [
                    np.concatenate([stack[i:j] for stack, i, j in zip(stacks, first, last, strict=True)])
                    for first, last in zip(begins, ends, strict=True)
                ]
        raise UsageError(
            f"partition.clients_per_domain={clients}: in {MAX_DRAWS} draws one or more clients of domain "
            f"{dataset.domains[position]} got none of its {len(rows)} rows; use fewer clients, or a smaller "
            "partition.size_sd"
        )
