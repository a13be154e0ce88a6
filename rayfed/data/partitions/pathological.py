"""Label skew in groups: consecutive clients share a small set of classes, in unequal parts."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class


@dataclass(frozen=True, kw_only=True)
class Pathological(PooledPartition):
    """PFLlib's "pathological" splits (Zhang et al. 2023, DBE): 20 clients, 2 classes of 10 or 10 of 100 each.

    Each class in turn goes to the first ceil(clients / C x `classes_per_client`) clients that have fewer than
    `classes_per_client` classes so far, so that groups of clients have the same classes. Of a class with n rows and m
    clients, all clients but the last get an integer drawn from [max(n / 10 m, least / C), n / m), where least is
    min(40, an equal share / 2), and the last client gets the rest; rows keep the dataset's order. With `balanced`, all
    but the last get floor(n / m), and the last gets the rest.
    """

    classes_per_client: int = option(2, low=1, help="number of classes per client")
    balanced: bool = option(False, help="divide each class equally instead of randomly")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        if self.classes_per_client > len(stacks):
            raise UsageError(
                f"partition.classes_per_client={self.classes_per_client}: {dataset.name} has {len(stacks)} classes"
            )
        quota = np.full(self.clients, self.classes_per_client)
        group_size = -(-self.clients * self.classes_per_client // len(stacks))  # rounded up
        least = min(40, len(rows) // (2 * self.clients)) / len(stacks)
        assigned: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for label, stack in enumerate(stacks):
            chosen = np.flatnonzero(quota > 0)[:group_size]
            if not len(chosen):
                raise UsageError(
                    f"partition.classes_per_client={self.classes_per_client}: no client is left for class {label} of "
                    f"{dataset.name}; {self.clients} clients x {self.classes_per_client} should be a multiple of "
                    f"its {len(stacks)} classes"
                )
            quota[chosen] -= 1
            sizes = self._sizes(len(stack), len(chosen), least, random)
            for client, pile in zip(chosen, np.split(stack, np.cumsum(sizes)), strict=True):
                assigned[client].append(pile)
        empty = [client for client, piles in enumerate(assigned) if not sum(map(len, piles))]
        if empty:
            raise UsageError(
                f"partition.clients={self.clients}: nothing of {dataset.name} is left for client {empty[0]}; "
                f"clients x classes_per_client should be a multiple of its {len(stacks)} classes"
            )
        # Shuffled so that cutting to per_client keeps the class mix.
        return [random.permutation(np.concatenate(piles)) for piles in assigned]

    def _sizes(self, size: int, clients: int, least: float, random: np.random.Generator) -> list[int]:
        """Return the sizes of the parts of a class, for all its clients but the last."""
        mean = size // clients
        if self.balanced:
            return [mean] * (clients - 1)
        low = min(int(max(size / clients / 10, least)), mean)
        return random.integers(low, max(mean, low + 1), clients - 1).tolist() if size else [0] * (clients - 1)
