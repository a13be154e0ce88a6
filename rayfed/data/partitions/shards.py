"""Label skew by shards: rows sorted by class are cut into pieces, and each client gets a few."""

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

    Rows sorted by class (in the dataset's order within a class) are cut into clients x `shards_per_client` shards of
    equal size, to within one row, and every client gets `shards_per_client` of them at random. The paper's own
    setting is `clients=100 common_test=true`.
    """

    shards_per_client: int = option(2, low=1, help="shards of a client; most clients have so many classes")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        count = self.clients * self.shards_per_client
        if count > len(rows):
            raise UsageError(
                f"partition.shards_per_client={self.shards_per_client}: {self.clients} clients need {count} shards, "
                f"{dataset.name} has {len(rows)} samples"
            )
        random = numpy_generator(self.seed, ASSIGNMENT)
        shards = np.array_split(np.concatenate(by_class(dataset, rows)), count)
        hands = random.permutation(count).reshape(self.clients, -1)
        # Shuffled, so that a cut (per_client) keeps a client's class mix.
        return [random.permutation(np.concatenate([shards[shard] for shard in hand])) for hand in hands]
