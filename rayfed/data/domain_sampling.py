"""How each domain of a dataset is divided into training and test examples, and how much of it is kept."""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.domain_selection import DomainSelection
from rayfed.data.draws import floor_share, numpy_generator
from rayfed.data.normalisation import ChannelNormalisation

SMALLEST = "smallest"


@dataclass(frozen=True, kw_only=True)
class DomainSampling(DomainSelection, ChannelNormalisation):
    """The options of image datasets with several domains.

    ADCOL (section 5.1): test=0.2, per_party=smallest. FRAug (section 4): test=0.1, and share=0.01 for digits or 0.1 for
    PACS and OfficeHome.
    """

    test: float = option(
        0.2, low=0, below=1, help="share of each domain that is for testing, where the split is random"
    )
    per_party: int | str | None = option(
        None, low=1, help='at most so many training examples per domain; "smallest": as many as the smallest has'
    )
    share: float = option(1.0, above=0, high=1, help="share of each domain's training examples that is kept")
    seed: int = option(0, low=0, help="of the random split and of which examples are kept")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.per_party, str) and self.per_party != SMALLEST:
            raise UsageError(f"data.per_party={self.per_party!r}: expected a whole number, {SMALLEST!r} or null")

    def sample(
        self,
        sizes: Mapping[str, int],
        published: Mapping[str, np.ndarray] | None = None,
        made_of: Mapping[str, str] | None = None,
    ) -> dict[str, "SampledRows"]:
        """Of each domain of so many examples, those that are kept, training examples first.

        `published` gives the domains' own test examples, bool [n]; without it they are drawn. A domain that nobody
        holds is kept whole. `made_of` names the domain that another one shows anew, row by row: both are tested on the
        same rows, and train from opposite ends of one order, so that up to a half they have no row in common.
        """
        dealt = {}
        for name, size in sizes.items():
            shown = (made_of or {}).get(name)
            is_test = published[name] if published else None
            dealt[name] = self._dealt(name, shown or name, size, is_test, from_the_end=shown is not None)
        free = [len(train) for name, (train, _) in dealt.items() if name not in self.held_out]
        most = min(free) if isinstance(self.per_party, str) else self.per_party
        kept = {}
        for name, (train, test) in dealt.items():
            part = np.sort(train if name in self.held_out else train[:most])
            rows = np.concatenate([part, np.sort(test)])
            kept[name] = SampledRows(rows, np.arange(len(rows)) >= len(part))
        return kept

    def _dealt(
        self, name: str, drawn_as: str, size: int, is_test: np.ndarray | None, *, from_the_end: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Training rows in random order, cut to their share, and test rows; the same for one seed and `drawn_as`."""
        order = numpy_generator(self.seed, zlib.crc32(drawn_as.encode())).permutation(size)
        if is_test is None:
            count = floor_share(size, 1 - self.test)
            train, test = order[:count], order[count:]
        else:
            train, test = order[~is_test[order]], order[is_test[order]]
        if from_the_end:
            train = train[::-1]
        if name in self.held_out:
            return train, test
        return train[: max(1, floor_share(len(train), self.share))], test


@dataclass(frozen=True)
class SampledRows:
    """Rows of a domain, and which of them are test examples."""

    rows: np.ndarray
    is_test: np.ndarray
