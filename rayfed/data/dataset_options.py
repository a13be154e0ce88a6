"""Options that several datasets share: normalisation, and the selection and sampling of domains."""

import copy
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option, suggestion
from rayfed.core.rng import floor_share, numpy_generator
from rayfed.data.dataset import Dataset

IMAGENET_MEAN = [0.485, 0.456, 0.406]
IMAGENET_STD = [0.229, 0.224, 0.225]
MEAN_HELP = "subtracted from images in [0, 1]; one number, or one per channel"
STD_HELP = "images are divided by it; one number, or one per channel"


@dataclass(frozen=True, kw_only=True)
class ChannelNormalisation:
    """Options that normalise images by channel.

    Attributes:
        channels: Number of channels; None: only the files tell.
    """

    channels: ClassVar[int | None] = 3

    mean: list[float] = option([0.5], help=MEAN_HELP)
    std: list[float] = option([0.5], above=0, help=STD_HELP)

    def __post_init__(self) -> None:
        if self.channels is not None:
            self.normalisation(self.channels)

    def normalisation(self, channels: int) -> dict[str, Any]:
        """Return the arguments `mean` and `std` of `Dataset`, in which a single number is repeated for each channel."""
        pairs = {}
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) not in (1, channels):
                raise UsageError(f"data.{name}={values}: expected {channels} numbers, or one for all channels")
            values = tuple(values)
            if len(values) == 1:
                values *= channels
            pairs[name] = values
        return pairs


SMALLEST = "smallest"


@dataclass(frozen=True, kw_only=True)
class DomainSelection:
    """Options of datasets with several domains."""

    name: ClassVar[str]

    domains: list[str] = option([], help="domains to use, in this order; empty: all")
    left_out: tuple[str, ...] = field(default=(), init=False)
    """The domains that no client holds, the "ood" test sets. `leave_out` of the configuration replaces them."""

    absent: tuple[str, ...] = field(default=(), init=False)
    """The names in `data.without`: what is computed over several domains does not count these."""

    def load(self) -> Dataset:
        """Return the examples of the selected domains."""
        raise NotImplementedError

    def available_domains(self) -> tuple[str, ...]:
        """Return the names of all domains of the dataset."""
        raise NotImplementedError

    def selected_domains(self) -> tuple[str, ...]:
        """Return the domains in use, with those that no client holds; UsageError if a name is unknown."""
        available = self.available_domains()
        for name in self.domains:
            if name not in available:
                raise UsageError(f"data.domains={name}: no such domain; {suggestion(name, available)}")
        return tuple(dict.fromkeys(self.domains)) or available

    def without(self, domains: Sequence[str]) -> Self:
        """Return the same options for a dataset where no client holds `domains`."""
        return self._with("left_out", domains)

    def marked_absent(self, names: Sequence[str]) -> Self:
        """Return the same options for a dataset from which clients are left out."""
        return self._with("absent", names)

    def _with(self, name: str, value: Sequence[str]) -> Self:
        data = copy.copy(self)
        object.__setattr__(data, name, tuple(value))
        return data


@dataclass(frozen=True, kw_only=True)
class DomainSampling(DomainSelection, ChannelNormalisation):
    """Options of image datasets with several domains.

    ADCOL (section 5.1): test=0.2, per_party=smallest. FRAug (section 4): test=0.1, and share=0.01 for digits or 0.1 for
    PACS and OfficeHome.
    """

    test: float = option(0.2, low=0, below=1, help="share of each domain for testing, if the split is random")
    per_party: int | str | None = option(
        None, low=1, help='maximum of training examples per domain; "smallest": as many as the smallest domain has'
    )
    share: float = option(1.0, above=0, high=1, help="share of each domain's training examples that is kept")
    seed: int = option(0, low=0, help="seed of the random split and of the choice of examples to keep")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.per_party, str) and self.per_party != SMALLEST:
            raise UsageError(f"data.per_party={self.per_party!r}: expected an integer, {SMALLEST!r} or null")

    def sample(
        self,
        sizes: Mapping[str, int],
        published: Mapping[str, np.ndarray] | None = None,
        made_of: Mapping[str, str] | None = None,
    ) -> dict[str, "SampledRows"]:
        """Return the rows to keep of each domain, training rows first. Domains that are left out keep all their rows.

        Args:
            sizes: Number of examples of each domain.
            published: Each domain's own test examples, bool [n]; None: they are drawn.
            made_of: The original domain of each domain that is made of another domain, row by row. Both are tested on
                the same rows, and take their training rows from opposite ends of the same random order. So they have no
                training row in common as long as each keeps at most half of them.
        """
        original = {name: name for name in sizes} | dict(made_of or {})
        drawn = {}
        for name, size in sizes.items():
            is_test = None
            if published:
                is_test = published[name]
            drawn[name] = self._draw(name, original[name], size, is_test)
        train_sizes = []
        for name, (train, _) in drawn.items():
            if name not in self.left_out:
                train_sizes.append(len(train))
        limit = self.per_party
        if isinstance(limit, str):
            limit = min(train_sizes)
        sampled = {}
        for name, (train, test) in drawn.items():
            if name not in self.left_out:
                train = train[:limit]
            train = np.sort(train)
            rows = np.concatenate([train, np.sort(test)])
            is_test = np.arange(len(rows)) >= len(train)
            sampled[name] = SampledRows(rows, is_test)
        return sampled

    def _draw(self, name: str, original: str, size: int, is_test: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
        """Return training rows, cut to their share, and test rows, in the random order of the original domain."""
        order = numpy_generator(self.seed, zlib.crc32(original.encode())).permutation(size)
        if is_test is None:
            count = floor_share(size, 1 - self.test)
            train = order[:count]
            test = order[count:]
        else:
            train = order[~is_test[order]]
            test = order[is_test[order]]
        if name != original:
            train = train[::-1]
        if name in self.left_out:
            return train, test
        count = floor_share(len(train), self.share)
        return train[: max(1, count)], test


@dataclass(frozen=True)
class SampledRows:
    """The rows of a domain that are kept, and which of them are test examples."""

    rows: np.ndarray
    is_test: np.ndarray
