"""Label skew: two published ways to draw clients' class mixes from a Dirichlet distribution."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset
from rayfed.data.partition import DEAL, Pooled, generator
from rayfed.errors import UsageError
from rayfed.options import option

DRAWS = 1000


@dataclass(frozen=True, kw_only=True)
class Dirichlet(Pooled):
    """Label skew, blind to domains. The smaller `alpha`, the fewer classes a client has.

    By default each class is shared out over the clients in proportions ~ Dirichlet(alpha), except that a client
    that already has its equal share gets no more (the rule of PFLlib's splits); sizes differ between clients.

    With `equal`, every client draws a class mix ~ Dirichlet(alpha x base) of its own and takes images by it until it
    has its equal share (Hsu, Qi and Brown 2019); a class that runs out leaves the mix, and where no class of the mix
    is left, the client takes from what is left in proportion. With `base` "prior" the parameters sum to `alpha`
    instead of `alpha` x classes, which is much harder: about one or two classes per client.
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 is strong skew, 100 nearly none")
    min_size: int | None = option(
        None, low=1, help="redraw until every client has so many samples; null: 40, or half an equal share if less"
    )
    equal: bool = option(False, help="clients of equal size, each with a class mix of its own")
    base: str = option("ones", choices=("ones", "prior"), help="equal: alpha per class, or alpha x class frequency")

    def __post_init__(self) -> None:
        if self.base == "prior" and not self.equal:
            raise UsageError("partition.base=prior: has a meaning only with partition.equal=true")
        if self.min_size is not None and self.equal:
            raise UsageError(f"partition.min_size={self.min_size}: equal clients need none; drop it or partition.equal")

    def deal(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = generator(self.seed, DEAL)
        labels = dataset.labels[rows]
        stacks = [rows[labels == label] for label in range(dataset.num_classes)]
        if self.equal:
            return self._equal(stacks, random)
        smallest = max(1, min(40, len(rows) // (2 * self.clients))) if self.min_size is None else self.min_size
        if smallest * self.clients > len(rows):
            raise UsageError(
                f"partition.min_size={smallest}: {self.clients} clients would need {smallest * self.clients} samples, "
                f"{dataset.name} has {len(rows)}"
            )
        best = 0
        for _ in range(DRAWS):
            dealt = self._unequal(stacks, len(rows), random)
            sizes = [sum(map(len, piles)) for piles in dealt]
            if min(sizes) >= smallest:
                # Shuffled, so that a cut (per_client) keeps a client's class mix.
                return [random.permutation(np.concatenate(piles)) for piles in dealt]
            best = max(best, min(sizes))
        raise UsageError(
            f"partition.alpha={self.alpha}: in {DRAWS} draws for {self.clients} clients the smallest had at most "
            f"{best} samples, fewer than min_size={smallest}; raise alpha, lower min_size or have fewer clients"
        )

    def _unequal(self, stacks: list[np.ndarray], total: int, random: np.random.Generator) -> list[list[np.ndarray]]:
        dealt: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        sizes = np.zeros(self.clients, int)
        for stack in stacks:
            weights = random.dirichlet(np.full(self.clients, self.alpha)) * (sizes < total / self.clients)
            if not weights.sum() > 0:  # a tiny alpha put all weight on clients that are full: share equally instead
                weights = (sizes < total / self.clients).astype(float)
            ends = (np.cumsum(weights / weights.sum())[:-1] * len(stack)).astype(int)
            for client, pile in enumerate(np.split(random.permutation(stack), ends)):
                dealt[client].append(pile)
                sizes[client] += len(pile)
        return dealt

    def _equal(self, stacks: list[np.ndarray], random: np.random.Generator) -> list[np.ndarray]:
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
