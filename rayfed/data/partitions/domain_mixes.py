"""Several clients in every domain, of different sizes and class mixes: feature skew and some label skew."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset
from rayfed.data.partition import DEAL, by_class, generator
from rayfed.data.partitions.domains import Domains
from rayfed.errors import UsageError
from rayfed.options import option

MIX = 1  # the purpose of the stream, beside the two that Domains draws from with DEAL
DRAWS = 20_000


@dataclass(frozen=True, kw_only=True)
class DomainMixes(Domains):
    """The clients of de Luca et al. 2022 (data augmentation for federated domain generalisation): 12 of 3 domains.

    In a domain with n training rows, k clients have sizes ~ Normal(n / (k + 1), `size_sd`²) and class mixes
    ~ Dirichlet(`alpha` x base) over the domain's classes, base summing to 1; of each class a client has the whole part
    of size x mix. All clients of a domain are drawn again where a class does not have enough rows. About 1/(k + 1) of
    the rows is left.
    """

    clients_per_domain: int = option(4, low=1, help="clients of a domain")
    alpha: float = option(200.0, above=0, help="concentration, the sum over all classes")
    base: str = option("ones", choices=("ones", "prior"), help="mixes around equal classes, or the domain's own mix")
    size_sd: float = option(100.0, low=0, help="standard deviation of a client's size, in rows")

    def __post_init__(self) -> None:
        if self.parts is not None:
            raise UsageError(f"partition.parts={self.parts}: sizes are drawn here; leave it out")

    def deal(self, dataset: Dataset, rows: np.ndarray, position: int) -> list[np.ndarray]:
        random = generator(self.seed, DEAL, position, 0, MIX)
        stacks = by_class(dataset, rows)
        left = np.array([len(stack) for stack in stacks])
        present, clients = left > 0, self.clients_per_domain
        base = left[present] if self.base == "prior" else np.ones(present.sum())
        for _ in range(DRAWS):
            sizes = random.normal(len(rows) / (clients + 1), self.size_sd, clients).clip(0)
            counts = np.zeros((clients, len(left)), int)
            counts[:, present] = sizes[:, None] * random.dirichlet(self.alpha * base / base.sum(), clients)
            if (counts.sum(0) <= left).all() and counts.sum(1).all():
                ends = counts.cumsum(0)
                return [
                    np.concatenate([stacks[c][ends[i, c] - counts[i, c] : ends[i, c]] for c in range(len(left))])
                    for i in range(clients)
                ]
        scarce = int(np.where(present, left, len(rows)).argmin())
        raise UsageError(
            f"partition.name=domain_mixes: {DRAWS} draws gave no {clients} clients of domain "
            f"{dataset.domains[position]} with rows for all ({len(rows)} rows, {left[scarce]} of class {scarce}); "
            "try partition.base=prior, a smaller size_sd or fewer clients_per_domain"
        )
