"""Label skew: every class is shared out over the clients in proportions from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class, check_min_size, draw_until


@dataclass(frozen=True, kw_only=True)
class Dirichlet(PooledPartition):
    """Label skew, blind to domains. The smaller `alpha`, the fewer classes a client has.

    Class after class is cut in proportions ~ Dirichlet(alpha) over the clients, except that with `capped` a client
    that already has its equal share gets no more; sizes differ. All is drawn again until every client has `min_size`
    rows. Capped, it is the rule of PFNM (Yurochkin et al. 2019), of PFLlib's "practical" splits, and, with
    `min_size=10 common_test=true`, of NIID-Bench (Li et al. 2022: p_k ~ Dir(beta)).
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 is strong skew, 100 nearly none")
    min_size: int | None = option(
        None, low=1, help="redraw until every client has so many samples; null: 40, or half an equal share if less"
    )
    capped: bool = option(True, help="who has an equal share gets no more; false: the proportions as they are drawn")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        least = max(1, min(40, len(rows) // (2 * self.clients))) if self.min_size is None else self.min_size
        check_min_size(least, self.clients, dataset, rows)
        dealt = draw_until(
            lambda: self._draw(stacks, len(rows), random),
            least,
            keys=f"partition.alpha={self.alpha}",
            remedy="raise alpha, lower min_size or have fewer clients",
        )
        return [random.permutation(own) for own in dealt]  # shuffled, so that a cut (per_client) keeps the class mix

    def _draw(self, stacks: list[np.ndarray], total: int, random: np.random.Generator) -> list[np.ndarray]:
        dealt: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        sizes = np.zeros(self.clients, int)
        for stack in stacks:
            open_ = sizes < total / self.clients if self.capped and len(stack) else np.ones(self.clients, bool)
            weights = random.dirichlet(np.full(self.clients, self.alpha)) * open_
            if not weights.sum() > 0:  # a tiny alpha put all weight on clients that are full: share equally instead
                weights = open_.astype(float)
            ends = (np.cumsum(weights / weights.sum())[:-1] * len(stack)).astype(int)
            for client, pile in enumerate(np.split(random.permutation(stack), ends)):
                dealt[client].append(pile)
                sizes[client] += len(pile)
        return [np.concatenate(piles) for piles in dealt]
