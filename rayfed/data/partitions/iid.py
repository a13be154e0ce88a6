"""Equal random shares."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset
from rayfed.data.partition import DEAL, Pooled, generator


@dataclass(frozen=True, kw_only=True)
class Iid(Pooled):
    """Every client gets an equal random share of all rows."""

    def deal(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(generator(self.seed, DEAL).permutation(rows), self.clients)
