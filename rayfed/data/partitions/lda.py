"""Label skew: clients of equal size, each with a class mix of its own from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.options import option
from rayfed.data.dataset import Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class


@dataclass(frozen=True, kw_only=True)
class Lda(PooledPartition):
    """Latent Dirichlet allocation (Hsu, Qi and Brown 2019), without replacement as in FedDebias (Guo et al. 2023).

    Every client draws a class mix ~ Dirichlet(alpha x base) and takes rows by it until it has its equal share; a class
    that runs out leaves the mix, and where no class of the mix is left, the client takes from what is left in
    proportion. With `base` "prior" (the class frequencies) the parameters sum to `alpha`, in place of `alpha` x
    classes, which is much harder: about one or two classes per client. FedDebias takes "prior" for MNIST and CIFAR-10
    and "ones" for CIFAR-100.
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 is strong skew, 100 nearly none")
    base: str = option("ones", choices=("ones", "prior"), help="alpha per class, or alpha x class frequency")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        counts = np.array([len(stack) for stack in stacks])
        present = counts > 0
        base = counts[present] / counts.sum() if self.base == "prior" else np.ones(present.sum())
        stacks = [random.permutation(stack) for stack in stacks]
        left = counts.copy()
        size = min(counts.sum() // self.clients, self.per_client or counts.sum())
        dealt = []
        for _ in range(self.clients):
            mix = np.zeros(len(stacks))
            mix[present] = random.dirichlet(self.alpha * base)
            taken = _draw(mix, left, size, random)
            piles = [stack[rest - n : rest] for stack, rest, n in zip(stacks, left, taken, strict=True)]
            left -= taken
            dealt.append(random.permutation(np.concatenate(piles)))
        return dealt


def _draw(mix: np.ndarray, left: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """How many of each class: `size` draws by `mix`, those of a class that has run out being drawn again."""
    taken = np.zeros_like(left)
    while taken.sum() < size:
        weights = mix * (left > taken)
        if not weights.sum() > 0:
            weights = (left - taken).astype(float)
        drawn = random.multinomial(size - taken.sum(), weights / weights.sum())
        taken = np.minimum(taken + drawn, left)
    return taken
