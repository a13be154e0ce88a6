"""Label skew: every client has k classes."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class


@dataclass(frozen=True, kw_only=True)
class LabelK(PooledPartition):
    """NIID-Bench's #C = k (Li et al. 2022, section 4.1): every client has `classes_per_client` classes.

    Client i has class i mod C and further classes at random. The rows of a class are divided randomly and equally among
    the clients that have it. If there are fewer clients than classes, rows of a class that no client has are unused.
    """

    classes_per_client: int = option(2, low=1, help="k, the number of classes per client")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        present = [label for label, stack in enumerate(stacks) if len(stack)]
        if self.classes_per_client > len(present):
            raise UsageError(
                f"partition.classes_per_client={self.classes_per_client}: {dataset.name} has {len(present)} classes"
            )
        owners: dict[int, list[int]] = {label: [] for label in present}
        for client in range(self.clients):
            first = present[client % len(present)]
            others = [label for label in present if label != first]
            for label in [first, *random.permutation(others)[: self.classes_per_client - 1].tolist()]:
                owners[label].append(client)
        assigned: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for label, clients in owners.items():
            if not clients:
                continue
            if len(clients) > len(stacks[label]):
                raise UsageError(
                    f"partition.clients={self.clients}: {len(clients)} clients share class {label} of {dataset.name}, "
                    f"which has {len(stacks[label])} samples; use fewer clients or fewer classes_per_client"
                )
            shuffled = random.permutation(stacks[label])
            for client, pile in zip(clients, np.array_split(shuffled, len(clients)), strict=True):
                assigned[client].append(pile)
        # Shuffled so that cutting to per_client keeps the class mix.
        return [random.permutation(np.concatenate(piles)) for piles in assigned]
