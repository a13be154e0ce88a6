"""Partitions that pool all rows, whatever their domain: random shares, and clients that differ in their classes.

Each partition shuffles the rows of a client at the end, so that cutting them to `per_client` keeps the mix of classes.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.rng import numpy_generator
from rayfed.data.dataset import Dataset, Rows
from rayfed.data.partitions.base import (
    ASSIGNMENT,
    PooledPartition,
    by_class,
    check_min_size,
    draw_until,
    joined,
    shuffled,
    sizes_of,
    taken_from,
)


@dataclass(frozen=True, kw_only=True)
class Dirichlet(PooledPartition):
    """Label skew that ignores domains. The smaller `alpha`, the fewer classes a client has.

    One class after the other is divided in proportions ~ Dirichlet(alpha) over the clients. With `capped`, a client
    that already has an equal share of all rows gets no more. Client sizes differ. The draw is repeated until every
    client has `min_size` rows. With `capped`, this is the rule of PFNM (Yurochkin et al. 2019), of PFLlib's "practical"
    splits, and with `min_size=10 common_test=true` of NIID-Bench (Li et al. 2022: p_k ~ Dir(beta)).
    """

    alpha: float = option(0.1, above=0, help="concentration; 0.1 gives strong skew, 100 nearly none")
    min_size: int | None = option(
        None, low=1, help="minimum of examples per client, by repeated draws; null: 40, or half an equal share if less"
    )
    capped: bool = option(True, help="a client with an equal share gets no more; false: use the proportions as drawn")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        least = self.min_size
        if least is None:
            half_a_share = len(rows) // (2 * self.clients)
            least = max(1, min(40, half_a_share))
        check_min_size(least, self.clients, dataset, rows)
        draw = partial(self._draw, stacks, len(rows), random)
        drawn = draw_until(draw, least, keys=f"partition.alpha={self.alpha}")
        return shuffled(drawn, random)

    def _draw(self, stacks: list[Rows], total: int, random: np.random.Generator) -> list[Rows]:
        """Return the rows of each client by one draw."""
        sizes = np.zeros(self.clients, int)
        piles = []
        for stack in stacks:
            eligible = np.ones(self.clients, bool)
            if self.capped and len(stack):
                eligible = sizes < total / self.clients
            weights = random.dirichlet(np.full(self.clients, self.alpha)) * eligible
            if not weights.sum() > 0:  # a tiny alpha put all weight on full clients: divide equally instead
                weights = eligible.astype(float)
            shares = np.cumsum(weights / weights.sum())
            ends = (shares[:-1] * len(stack)).astype(int)
            piles.append(np.split(random.permutation(stack), ends))
            sizes += np.diff(ends, prepend=0, append=len(stack))
        return joined(list(zip(*piles, strict=True)))


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

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        counts = sizes_of(stacks)
        total = counts.sum()
        present = counts > 0
        base = np.ones(present.sum())
        if self.base == "prior":
            base = counts[present] / total
        stacks = shuffled(stacks, random)
        remaining = counts.copy()
        size = min(total // self.clients, self.per_client or total)
        assigned = []
        for _ in range(self.clients):
            mix = np.zeros(len(stacks))
            mix[present] = random.dirichlet(self.alpha * base)
            taken = _drawn(mix, remaining, size, random)
            held = taken_from(stacks, remaining - taken, remaining)
            remaining -= taken
            assigned.append(random.permutation(held))
        return assigned


def _drawn(mix: np.ndarray, remaining: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Return the number of rows per class: `size` draws by `mix`, repeated for classes that have run out."""
    taken = np.zeros_like(remaining)
    while taken.sum() < size:
        weights = mix * (remaining > taken)
        if not weights.sum() > 0:
            weights = (remaining - taken).astype(float)
        missing = size - taken.sum()
        drawn = random.multinomial(missing, weights / weights.sum())
        taken = np.minimum(taken + drawn, remaining)
    return taken


def check_classes(asked: int, present: int, dataset: Dataset) -> None:
    """Raise UsageError if a client asks for more classes than there are."""
    if asked > present:
        raise UsageError(f"partition.classes_per_client={asked}: {dataset.name} has {present} classes")


def present_classes(dataset: Dataset, rows: Rows, asked: int) -> dict[int, Rows]:
    """Return the rows of each class that has some, after checking that a client asks for no more classes."""
    stacks = {label: stack for label, stack in enumerate(by_class(dataset, rows)) if len(stack)}
    check_classes(asked, len(stacks), dataset)
    return stacks


@dataclass(frozen=True, kw_only=True)
class LabelK(PooledPartition):
    """NIID-Bench's #C = k (Li et al. 2022, section 4.1): every client has `classes_per_client` classes.

    Client i has class i mod C and further classes at random. The rows of a class are divided randomly and equally among
    the clients that have it. If there are fewer clients than classes, rows of a class that no client has are unused.
    """

    classes_per_client: int = option(2, low=1, help="k, the number of classes per client")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = present_classes(dataset, rows, self.classes_per_client)
        present = list(stacks)
        owners = self._owners(present, random)
        assigned: list[list[Rows]] = [[] for _ in range(self.clients)]
        for label, clients in owners.items():
            if clients:
                of_class = random.permutation(stacks[label])
                piles = np.array_split(of_class, len(clients))
                for client, pile in zip(clients, piles, strict=True):
                    assigned[client].append(pile)
        return shuffled(joined(assigned), random)

    def _owners(self, present: list[int], random: np.random.Generator) -> dict[int, list[int]]:
        """Return the clients that have each class, by class."""
        owners: dict[int, list[int]] = {label: [] for label in present}
        for client in range(self.clients):
            first = present[client % len(present)]
            others = [label for label in present if label != first]
            drawn = random.permutation(others)[: self.classes_per_client - 1]
            for label in [first, *drawn.tolist()]:
                owners[label].append(client)
        return owners


@dataclass(frozen=True, kw_only=True)
class PowerLaw(PooledPartition):
    """FedProx's MNIST (Li et al. 2020, section 5.1), which LEAF, FedML and FLUTE use: sizes follow a power law.

    The paper has 1,000 clients with two digits each, about 69 images on average. As in the authors' code, client i has
    the classes i, i + 1, … modulo C and `least` rows of each. The remaining rows of a class are divided among its
    clients in shares that are log-normal, with the standard deviation `sigma` of their logarithms.
    """

    classes_per_client: int = option(2, low=1, help="number of classes per client")
    least: int = option(5, low=1, help="minimum of rows of each class that a client has")
    sigma: float = option(2.0, low=0, help="standard deviation of the logarithms of the shares; 0: equal shares")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = present_classes(dataset, rows, self.classes_per_client)
        present = list(stacks)
        assigned: list[list[Rows]] = [[] for _ in range(self.clients)]
        for place, label in enumerate(present):
            owners = self._owners(place, len(present))
            if not owners:
                continue
            sizes = self._sizes(len(stacks[label]), len(owners), label, dataset, random)
            piles = np.split(random.permutation(stacks[label]), np.cumsum(sizes))
            for client, pile in zip(owners, piles, strict=False):  # the last pile is what floors leave over
                assigned[client].append(pile)
        return shuffled(joined(assigned), random)

    def _owners(self, place: int, classes: int) -> list[int]:
        """Return the clients that have the class at `place` among the present ones."""
        return [client for client in range(self.clients) if (place - client) % classes < self.classes_per_client]

    def _sizes(self, rows: int, clients: int, label: int, dataset: Dataset, random: np.random.Generator) -> np.ndarray:
        """Return how many rows of a class each of its clients gets."""
        left = rows - self.least * clients
        if left < 0:
            raise UsageError(
                f"partition.least={self.least}: class {label} of {dataset.name} has {rows} rows for {clients} clients; "
                "use fewer clients, or a smaller minimum"
            )
        weights = random.lognormal(0.0, self.sigma, clients)
        return self.least + np.floor(left * weights / weights.sum()).astype(int)


@dataclass(frozen=True, kw_only=True)
class Pathological(PooledPartition):
    """PFLlib's "pathological" splits (Zhang et al. 2023, DBE): 20 clients, 2 classes of 10 or 10 of 100 each.

    Each class in turn goes to the first ceil(clients / C x `classes_per_client`) clients that have fewer than
    `classes_per_client` classes so far. So groups of clients have the same classes. Let a class have n rows and m
    clients. All clients but the last get an integer drawn from [max(n / 10 m, least / C), n / m); the last client gets
    the rest. Here least is min(40, an equal share / 2), and rows keep the dataset's order. With `balanced`, all but the
    last get floor(n / m).
    """

    classes_per_client: int = option(2, low=1, help="number of classes per client")
    balanced: bool = option(False, help="divide each class equally instead of randomly")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        stacks = by_class(dataset, rows)
        check_classes(self.classes_per_client, len(stacks), dataset)
        quota = np.full(self.clients, self.classes_per_client)
        group_size = math.ceil(self.clients * self.classes_per_client / len(stacks))
        half_a_share = len(rows) // (2 * self.clients)
        least = min(40, half_a_share) / len(stacks)
        assigned: list[list[Rows]] = [[] for _ in range(self.clients)]
        for label, stack in enumerate(stacks):
            chosen = np.flatnonzero(quota > 0)[:group_size]
            if not len(chosen):
                product = f"{self.clients} clients x {self.classes_per_client}"
                raise UsageError(
                    f"partition.classes_per_client={self.classes_per_client}: no client is left for class {label} of "
                    f"{dataset.name}; {product} should be a multiple of its {len(stacks)} classes"
                )
            quota[chosen] -= 1
            sizes = self._sizes(len(stack), len(chosen), least, random)
            piles = np.split(stack, np.cumsum(sizes))
            for client, pile in zip(chosen, piles, strict=True):
                assigned[client].append(pile)
        return shuffled(joined(assigned), random)

    def _sizes(self, size: int, clients: int, least: float, random: np.random.Generator) -> list[int]:
        """Return the sizes of the parts of a class, for all its clients but the last."""
        mean = size // clients
        if self.balanced or not size:
            return [mean] * (clients - 1)
        tenth = size / clients / 10
        low = min(int(max(tenth, least)), mean)
        drawn = random.integers(low, max(mean, low + 1), clients - 1)
        return drawn.tolist()


@dataclass(frozen=True, kw_only=True)
class Shards(PooledPartition):
    """The pathological partition of McMahan et al. 2017, section 3: 100 clients with two shards of MNIST each.

    The rows are sorted by class, in the dataset's order within a class. They are cut into clients x `shards_per_client`
    shards, and the sizes of these differ by at most one row. Every client gets `shards_per_client` of them at random.
    The paper uses `clients=100 common_test=true`.
    """

    shards_per_client: int = option(2, low=1, help="number of shards per client, and of classes of most clients")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        count = self.clients * self.shards_per_client
        random = numpy_generator(self.seed, ASSIGNMENT)
        sorted_rows = np.concatenate(by_class(dataset, rows))
        shards = np.array_split(sorted_rows, count)
        drawn = []
        for number in random.permutation(count):
            drawn.append(shards[number])
        n = self.shards_per_client
        starts = range(0, count, n)
        of_clients = []
        for first in starts:
            of_clients.append(drawn[first : first + n])
        return shuffled(joined(of_clients), random)


@dataclass(frozen=True, kw_only=True)
class Iid(PooledPartition):
    """Every client gets an equal random share of all rows."""

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        random = numpy_generator(self.seed, ASSIGNMENT)
        return np.array_split(random.permutation(rows), self.clients)


@dataclass(frozen=True, kw_only=True)
class Quantity(PooledPartition):
    """Random rows in shares q ~ Dirichlet(alpha) over the clients (NIID-Bench, Li et al. 2022: q ~ Dir(beta))."""

    alpha: float = option(0.5, above=0, help="concentration; 0.1 gives most rows to a few clients, 100 is nearly even")
    min_size: int = option(10, low=1, help="minimum of examples per client, by repeated draws")

    def assign_rows(self, dataset: Dataset, rows: Rows) -> list[Rows]:
        check_min_size(self.min_size, self.clients, dataset, rows)
        random = numpy_generator(self.seed, ASSIGNMENT)
        in_order = random.permutation(rows)

        def draw() -> list[Rows]:
            shares = random.dirichlet(np.full(self.clients, self.alpha))
            ends = np.cumsum(shares)[:-1] * len(rows)
            return np.split(in_order, ends.astype(int))

        return draw_until(draw, self.min_size, keys=f"partition.alpha={self.alpha}")
