"""What all partitions share: the seed, the validation share, and how rows are shuffled and held out."""

from dataclasses import dataclass

import numpy as np

from rayfed.data.dataset import Dataset, Part
from rayfed.errors import UsageError
from rayfed.options import option

# The purposes that a partition's seed serves; each has its own stream, so that one draw cannot shift another.
DEAL, TEST, VALIDATION = range(3)


def generator(seed: int, *purpose: int) -> np.random.Generator:
    """numpy's PCG64, for one seed and purpose."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *purpose])))


def share(size: int, fraction: float) -> int:
    """The whole part of `size` x `fraction`, not fooled by 0.29 x 100 = 28.999999999999996."""
    return int(size * fraction + 1e-9)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """Gives the rows of a dataset to clients; the same dataset, options and seed give the same rows for ever."""

    seed: int = option(0, low=0, help="of every draw that the partition makes")
    validation: float = option(
        0.1, low=0, below=1, help="share of each client's training part kept for validation, rounded down"
    )

    def split(self, dataset: Dataset) -> list[Part]:
        """One `Part` per client, ids 0..N-1 in order; no row is in two parts.

        Raises:
            UsageError: the dataset cannot be divided in this way.
        """
        raise NotImplementedError

    def part(self, client: int, domain: str, train: np.ndarray, test: np.ndarray) -> Part:
        """A client whose validation part is drawn from `train`; the rest comes back shuffled."""
        order = generator(self.seed, VALIDATION, client).permutation(train)
        held = share(len(train), self.validation)
        return Part(client, domain, order[held:], order[:held], test)


@dataclass(frozen=True, kw_only=True)
class Pooled(Partition):
    """All rows, the dataset's own test examples among them, dealt to clients; each splits its share by itself."""

    clients: int = option(20, low=1, help="how many clients")
    test: float = option(0.25, low=0, below=1, help="share of each client's rows that is its test part, rounded up")
    per_client: int | None = option(None, low=1, help="at most so many rows per client, before they are split")

    def deal(self, dataset: Dataset, rows: np.ndarray) -> list[np.ndarray]:
        """The rows of each client, in an order that may be cut anywhere."""
        raise NotImplementedError

    def split(self, dataset: Dataset) -> list[Part]:
        rows = dataset.rows()
        if self.clients > len(rows):
            raise UsageError(f"partition.clients={self.clients}: more than the {len(rows)} samples of {dataset.name}")
        parts = []
        for client, dealt in enumerate(self.deal(dataset, rows)):
            own = generator(self.seed, TEST, client).permutation(dealt[: self.per_client])
            training = share(len(own), 1 - self.test)
            if training == 0:
                raise UsageError(
                    f"partition.clients={self.clients}: client {client} gets {len(own)} samples of {dataset.name}, "
                    f"none to train on after partition.test={self.test}; fewer clients or a smaller test share"
                )
            parts.append(self.part(client, dataset.domain_of(own), own[:training], own[training:]))
        return parts
