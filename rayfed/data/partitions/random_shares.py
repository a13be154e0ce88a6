"""Random shares of all rows, of equal or of different sizes."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, Draw, PooledPartition, check_min_size, draw_until


@dataclass(frozen=True, kw_only=True)
class Iid(PooledPartition):
    """Every client gets an equal random share of all rows."""

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(numpy_generator(self.seed, ASSIGNMENT).permutation(rows), self.clients)


@dataclass(frozen=True, kw_only=True)
class Quantity(PooledPartition):
    """Random rows in shares q ~ Dirichlet(alpha) over the clients (NIID-Bench, Li et al. 2022: q ~ Dir(beta))."""

    alpha: float = option(0.5, above=0, help="concentration; 0.1 gives most rows to a few clients, 100 is nearly even")
    min_size: int = option(10, low=1, help="minimum of samples per client, by repeated draws")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        check_min_size(self.min_size, self.clients, dataset, rows)
        random = numpy_generator(self.seed, ASSIGNMENT)
        shuffled = random.permutation(rows)

        def draw() -> Draw:
            shares = random.dirichlet(np.full(self.clients, self.alpha))
            ends = (np.cumsum(shares)[:-1] * len(rows)).astype(int)
            return Draw(np.diff(ends, prepend=0, append=len(rows)), lambda: np.split(shuffled, ends))

        remedy = "raise alpha, lower min_size or use fewer clients"
        return draw_until(draw, self.min_size, keys=f"partition.alpha={self.alpha}", remedy=remedy)
