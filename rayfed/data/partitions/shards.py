"""Label skew by shards: rows sorted by class are cut into shards, and each client gets a few of them."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class


@dataclass(frozen=True, kw_only=True)
class Shards(PooledPartition):
    """The pathological partition of McMahan et al. 2017, section 3: 100 clients with two shards of MNIST each.

    The rows, sorted by class (in the dataset's order within a class), are cut into clients x `shards_per_client` shards
    whose sizes differ by at most one row, and every client gets `shards_per_client` of them at random. The paper uses
    `clients=100 common_test=true`.
    """

    shards_per_client: int = option(2, low=1, help="number of shards per client, and of classes of most clients")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        count = self.clients * self.shards_per_client
        if count > len(rows):
            raise UsageError(
                f"partition.shards_per_client={self.shards_per_client}: {self.clients} clients need {count} shards, "
                f"{dataset.name} has {len(rows)} samples"
            )
        random = numpy_generator(self.seed, ASSIGNMENT)
        shards = np.array_split(np.concatenate(by_class(dataset, rows)), count)
        shards_of = random.permutation(count).reshape(self.clients, -1)
        # Shuffled so that cutting to per_client keeps the class mix.
        return [random.permutation(np.concatenate([shards[shard] for shard in numbers])) for numbers in shards_of]
