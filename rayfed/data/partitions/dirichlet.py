"""Label skew: every class is divided among the clients in proportions drawn from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, Draw, PooledPartition, by_class, check_min_size, draw_until


@dataclass(frozen=True, kw_only=True)
class Dirichlet(PooledPartition):
    """Label skew that ignores domains. The smaller `alpha`, the fewer classes a client has.

    One class after the other is divided in proportions ~ Dirichlet(alpha) over the clients, except that with `capped`
    a client that already has an equal share of all rows gets no more. Client sizes differ. The draw is repeated until
    every client has `min_size` rows. With `capped`, this is the rule of PFNM (Yurochkin et al. 2019), of PFLlib's
    "practical" splits, and with `min_size=10 common_test=true` of NIID-Bench (Li et al. 2022: p_k ~ Dir(beta)).
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 gives strong skew, 100 nearly none")
    min_size: int | None = option(
        None,
        low=1,
        help="minimum of samples per client, by repeated draws; null: 40, or half of an equal share if that is less",
    )
    capped: bool = option(
        True, help="a client with an equal share gets no more; false: use the drawn proportions unchanged"
    )

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        least = max(1, min(40, len(rows) // (2 * self.clients))) if self.min_size is None else self.min_size
        check_min_size(least, self.clients, dataset, rows)
        assigned = draw_until(
            lambda: self._draw(stacks, len(rows), random),
            least,
            keys=f"partition.alpha={self.alpha}",
            remedy="raise alpha, lower min_size or use fewer clients",
        )
        # Shuffled so that cutting to per_client keeps the class mix.
        return [random.permutation(client_rows) for client_rows in assigned]

    def _draw(self, stacks: list[np.ndarray], total: int, random: np.random.Generator) -> Draw:
        sizes = np.zeros(self.clients, int)
        shuffled, ends = [], []
        for stack in stacks:
            eligible = sizes < total / self.clients if self.capped and len(stack) else np.ones(self.clients, bool)
            weights = random.dirichlet(np.full(self.clients, self.alpha)) * eligible
            if not weights.sum() > 0:  # a tiny alpha put all weight on full clients: divide equally instead
                weights = eligible.astype(float)
            ends.append((np.cumsum(weights / weights.sum())[:-1] * len(stack)).astype(int))
            shuffled.append(random.permutation(stack))
            sizes += np.diff(ends[-1], prepend=0, append=len(stack))

        def rows() -> list[np.ndarray]:
            piles = [np.split(stack, cuts) for stack, cuts in zip(shuffled, ends, strict=True)]
            return [np.concatenate(held) for held in zip(*piles, strict=True)]

        return Draw(sizes, rows)
