"""Partitions that pool all rows, whatever their domain: random shares, and clients that differ in their classes.

Each partition shuffles the rows of a client at the end, so that cutting them to `per_client` keeps the mix of classes.
"""

from dataclasses import dataclass
from functools import partial

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import Dataset
from rayfed.data.partitions.base import ASSIGNMENT, PooledPartition, by_class, check_min_size, draw_until


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
        None, low=1, help="minimum of samples per client, by repeated draws; null: 40, or half an equal share if less"
    )
    capped: bool = option(True, help="a client with an equal share gets no more; false: use the proportions as drawn")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        least = max(1, min(40, len(rows) // (2 * self.clients))) if self.min_size is None else self.min_size
        check_min_size(least, self.clients, dataset, rows)
        draw = partial(self._draw, stacks, len(rows), random)
        return [random.permutation(held) for held in draw_until(draw, least, keys=f"partition.alpha={self.alpha}")]

    def _draw(self, stacks: list[np.ndarray], total: int, random: np.random.Generator) -> list[np.ndarray]:
        sizes = np.zeros(self.clients, int)
        piles = []
        for stack in stacks:
            eligible = sizes < total / self.clients if self.capped and len(stack) else np.ones(self.clients, bool)
            weights = random.dirichlet(np.full(self.clients, self.alpha)) * eligible
            if not weights.sum() > 0:  # a tiny alpha put all weight on full clients: divide equally instead
                weights = eligible.astype(float)
            ends = (np.cumsum(weights / weights.sum())[:-1] * len(stack)).astype(int)
            piles.append(np.split(random.permutation(stack), ends))
            sizes += np.diff(ends, prepend=0, append=len(stack))
        return [np.concatenate(held) for held in zip(*piles, strict=True)]


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
            taken = _drawn(mix, remaining, size, random)
            piles = [stack[end - n : end] for stack, end, n in zip(stacks, remaining, taken, strict=True)]
            remaining -= taken
            assigned.append(random.permutation(np.concatenate(piles)))
        return assigned


def _drawn(mix: np.ndarray, remaining: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Return the number of rows per class: `size` draws by `mix`, repeated for classes that have run out."""
    taken = np.zeros_like(remaining)
    while taken.sum() < size:
        weights = mix * (remaining > taken)
        if not weights.sum() > 0:
            weights = (remaining - taken).astype(float)
        drawn = random.multinomial(size - taken.sum(), weights / weights.sum())
        taken = np.minimum(taken + drawn, remaining)
    return taken


def check_classes(asked: int, present: int, dataset: Dataset) -> None:
    """Raise UsageError if a client asks for more classes than there are."""
    if asked > present:
        raise UsageError(f"partition.classes_per_client={asked}: {dataset.name} has {present} classes")


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
        check_classes(self.classes_per_client, len(present), dataset)
        owners: dict[int, list[int]] = {label: [] for label in present}
        for client in range(self.clients):
            first = present[client % len(present)]
            others = [label for label in present if label != first]
            for label in [first, *random.permutation(others)[: self.classes_per_client - 1].tolist()]:
                owners[label].append(client)
        assigned: list[list[np.ndarray]] = [[] for _ in range(self.clients)]
        for label, clients in owners.items():
            if clients:
                shuffled = random.permutation(stacks[label])
                for client, pile in zip(clients, np.array_split(shuffled, len(clients)), strict=True):
                    assigned[client].append(pile)
        return [random.permutation(np.concatenate(piles)) for piles in assigned]


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
        check_classes(self.classes_per_client, len(stacks), dataset)
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
        return [random.permutation(np.concatenate(piles)) for piles in assigned]

    def _sizes(self, size: int, clients: int, least: float, random: np.random.Generator) -> list[int]:
        """Return the sizes of the parts of a class, for all its clients but the last."""
        mean = size // clients
        if self.balanced:
            return [mean] * (clients - 1)
        low = min(int(max(size / clients / 10, least)), mean)
        return random.integers(low, max(mean, low + 1), clients - 1).tolist() if size else [0] * (clients - 1)


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
        random = numpy_generator(self.seed, ASSIGNMENT)
        shards = np.array_split(np.concatenate(by_class(dataset, rows)), count)
        shards_of = random.permutation(count).reshape(self.clients, -1)
        return [random.permutation(np.concatenate([shards[shard] for shard in numbers])) for numbers in shards_of]


@dataclass(frozen=True, kw_only=True)
class Iid(PooledPartition):
    """Every client gets an equal random share of all rows."""

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        return np.array_split(numpy_generator(self.seed, ASSIGNMENT).permutation(rows), self.clients)


@dataclass(frozen=True, kw_only=True)
class Quantity(PooledPartition):
    """Random rows in shares q ~ Dirichlet(alpha) over the clients (NIID-Bench, Li et al. 2022: q ~ Dir(beta))."""

    alpha: float = option(0.5, above=0, help="concentration; 0.1 gives most rows to a few clients, 100 is nearly even")
    min_size: int = option(10, low=1, help="minimum of samples per client, by repeated draws")

    def assign_rows(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        check_min_size(self.min_size, self.clients, dataset, rows)
        random = numpy_generator(self.seed, ASSIGNMENT)
        shuffled = random.permutation(rows)

        def draw() -> list[np.ndarray]:
            shares = random.dirichlet(np.full(self.clients, self.alpha))
            return np.split(shuffled, (np.cumsum(shares)[:-1] * len(rows)).astype(int))

        return draw_until(draw, self.min_size, keys=f"partition.alpha={self.alpha}")
