"""What a dataset is before anybody holds it: all its examples pooled, each with its domain and its origin."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.data.lazy_rows import LazyRows
from rayfed.data.population import TestSet


class ClientRows(NamedTuple):
    """One client of a partition: its number, its domain, and the rows of the dataset in each of its three parts."""

    id: int
    domain: str
    train: np.ndarray
    val: np.ndarray
    test: np.ndarray


class ClientView(Protocol):
    """What a dataset changes in the images of a client once it is known who that client is, each image on its own."""

    def domain(self, client: int) -> str:
        """The domain of the client, in place of the one that the partition gave it."""

    def images(self, client: int, images: np.ndarray) -> np.ndarray:
        """The client's own view of `images`, in the same order."""


@dataclass(frozen=True)
class Dataset:
    """N pooled examples; a partition gives their rows to clients. `Dataset.of` fills in what is usual.

    Attributes:
        images: [N, ...]; uint8 [N, channels, height, width] for images, any other dtype reaches the model as it is. Of
            an array from `rayfed.data.cache.memory_mapped` (or any read-only `np.memmap`) only what is used is read.
        labels: int64 [N], class indices below `num_classes`.
        domain: whole numbers [N], positions in `domains`.
        is_test: bool [N], the dataset's own test examples.
        source: whole numbers [N], positions in `sources`; with `index`, int64 [N], it names the original of each row.
        original: whole numbers [N]: rows of one number show the same original, such as a digit on two grounds, and
            partitions keep them on one side; None where each row is an original.
        client: int64 [N], whose example it is by nature; None where the dataset does not say.
        mean, std: per channel in units of [0, 1]; uint8 images are normalised with them.
        ood: domains that no client may hold; their examples become the server's "ood" test sets.
        tests: further test sets for the server's model.
        personal: how a client's images differ from the pooled ones; None where they do not.
    """

    name: str
    images: np.ndarray | LazyRows
    labels: np.ndarray
    domain: np.ndarray
    domains: tuple[str, ...]
    is_test: np.ndarray
    source: np.ndarray
    sources: tuple[str, ...]
    index: np.ndarray
    num_classes: int
    client: np.ndarray | None = None
    leakage_group: np.ndarray | None = None
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    ood: tuple[str, ...] = ()
    tests: tuple[TestSet, ...] = ()
    client_view: ClientView | None = None

    def __post_init__(self) -> None:
        for name in ("images", "domain", "is_test", "source", "index", "client", "leakage_group"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.labels):
                raise UsageError(f"dataset {self.name}: {len(values)} {name} but {len(self.labels)} labels")
        if len(self.labels) and not 0 <= self.labels.min() <= self.labels.max() < self.num_classes:
            low, high = self.labels.min(), self.labels.max()
            raise UsageError(
                f"dataset {self.name}: labels {low}..{high}, but num_classes={self.num_classes} allows "
                f"0..{self.num_classes - 1}"
            )

        for name, names in (("domain", self.domains), ("source", self.sources)):
            codes = getattr(self, name)
            if len(codes) and not 0 <= codes.min() <= codes.max() < len(names):
                span = f"{codes.min()}..{codes.max()}"
                raise UsageError(f"dataset {self.name}: {name} {span}, but {name}s names {len(names)}")
        unknown = sorted(set(self.ood) - set(self.domains))
        if unknown:
            raise UsageError(f"dataset {self.name}: ood {unknown[0]!r}; its domains are {', '.join(self.domains)}")

    @classmethod
    def of(
        cls,
        name: str,
        images: np.ndarray | LazyRows,
        labels: np.ndarray,
        *,
        is_test: np.ndarray | None = None,
        num_classes: int | None = None,
        **others,
    ) -> "Dataset":
        """A dataset of one domain, called `name`, and of one source, "all", unless `others` says otherwise.

        `is_test` defaults to no test examples, `num_classes` to the highest label and one.
        """
        size = len(labels)
        filled = {
            "is_test": np.zeros(size, bool) if is_test is None else is_test,
            "domain": np.zeros(size, np.int16),
            "domains": (name,),
            "source": np.zeros(size, np.int8),
            "sources": ("all",),
            "index": np.arange(size),
            "num_classes": int(labels.max(initial=0)) + 1 if num_classes is None else num_classes,
        }
        return cls(name=name, images=images, labels=labels.astype(np.int64), **{**filled, **others})

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, *, is_test: bool | None = None, domain: str | None = None) -> np.ndarray:
        """The rows that clients may hold (no "ood" domain), optionally only of one part or of one domain."""
        wanted = np.ones(len(self), bool)
        for name in self.ood:
            wanted &= self.domain != self.domains.index(name)
        if is_test is not None:
            wanted &= self.is_test == is_test
        if domain is not None:
            wanted &= self.domain == self.domains.index(domain)
        return np.flatnonzero(wanted)

    def domain_of(self, rows: np.ndarray) -> str:
        """The name of the only domain among `rows`, or "mixed"."""
        found = np.unique(self.domain[rows])
        return self.domains[found[0]] if len(found) == 1 else "mixed"


def index_within_group(groups: np.ndarray) -> np.ndarray:
    """int64 [N]: the number of each row among those of its group, such as its place in its file."""
    found = np.empty(len(groups), np.int64)
    for group in np.unique(groups):
        own = groups == group
        found[own] = np.arange(own.sum())
    return found
