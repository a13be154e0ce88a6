"""Label skew: clients of equal size, each with a class mix drawn from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class


@dataclass(frozen=True, kw_only=True)
class Lda(PooledPartition):
    """Latent Dirichlet allocation (Hsu, Qi and Brown 2019), without replacement as in FedDebias (Guo et al. 2023).

    Every client draws a class mix ~ Dirichlet(alpha x base) and takes rows accordingly until it has an equal share. A
    class that runs out leaves the mix; if no class of the mix is left, the client takes the remaining classes in
    proportion to their sizes. With `base=prior` (the class frequencies) the parameters sum to `alpha` instead of
    `alpha` x classes, which gives a much stronger skew: one or two classes per client. FedDebias uses "prior" for MNIST
    and CIFAR-10 and "ones" for CIFAR-100.
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 gives strong skew, 100 nearly none")
    base: str = option(
        "ones", choices=("ones", "prior"), help="Dirichlet parameters: alpha per class, or alpha x class frequency"
    )

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        counts = np.array([len(stack) for stack in stacks])
        present = counts > 0
        base = counts[present] / counts.sum() if self.base == "prior" else np.ones(present.sum())
        stacks = [random.permutation(stack) for stack in stacks]
        remaining = counts.copy()
        size = min(counts.sum() // self.clients, self.per_client or counts.sum())
        assigned = []
        for _ in range(self.clients):
            mix = np.zeros(len(stacks))
            mix[present] = random.dirichlet(self.alpha * base)
            taken = _draw(mix, remaining, size, random)
            piles = [stack[end - n : end] for stack, end, n in zip(stacks, remaining, taken, strict=True)]
            remaining -= taken
            assigned.append(random.permutation(np.concatenate(piles)))
        return assigned


def _draw(mix: np.ndarray, remaining: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Return the number of rows per class: `size` draws by `mix`, repeated for classes that have run out."""
    taken = np.zeros_like(remaining)
    while taken.sum() < size:
        weights = mix * (remaining > taken)
        if not weights.sum() > 0:
            weights = (remaining - taken).astype(float)
        drawn = random.multinomial(size - taken.sum(), weights / weights.sum())
        taken = np.minimum(taken + drawn, remaining)
    return taken
