"""IID clients: equal random shares."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition


@dataclass(frozen=True, kw_only=True)
class Iid(PooledPartition):
    """Every client gets an equal random share of all rows."""

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(numpy_generator(self.seed, ASSIGNMENT).permutation(rows), self.clients)
