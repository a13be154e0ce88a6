"""Label skew at its sharpest: clients that hold different classes."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, TEST, Partition


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """In every domain one client for each group of classes; the groups are the classes in order, cut as evenly as goes.

    Two groups of seven classes are 0-3 and 4-6 (FedDebias's split of PACS). A client's test part are the domain's own
    test examples of its classes; with `test_absent` those of the other classes, which show what a model makes of
    classes that it never saw. Where several clients could have such an example, they share them at random.
    """

    groups: int = option(2, low=2, help="groups of classes, and so clients, in each domain")
    per_client: int | None = option(None, low=1, help="at most so many rows per client, before validation is held out")
    test_absent: bool = option(False, help="test on the classes that the client does not hold")

    def split(self, dataset: Dataset) -> list[ClientRows]:
        if self.groups > dataset.num_classes:
            raise UsageError(f"partition.groups={self.groups}: {dataset.name} has {dataset.num_classes} classes only")
        bounds = np.array_split(np.arange(dataset.num_classes), self.groups)
        parts: list[ClientRows] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            train, test = (dataset.rows(is_test=is_test, domain=domain) for is_test in (False, True))
            tested = self._tested(dataset.labels[test], bounds, position)
            for group, classes in enumerate(bounds):
                own = train[np.isin(dataset.labels[train], classes)]
                own = numpy_generator(self.seed, ASSIGNMENT, position, group).permutation(own)[: self.per_client]
                if not len(own):
                    held = f"{classes[0]}..{classes[-1]}"
                    raise UsageError(f"partition=classes: domain {domain} of {dataset.name} has no example of {held}")
                parts.append(self.client_rows(len(parts), domain, own, test[tested == group]))
        return parts

    def _tested(self, labels: np.ndarray, bounds: list[np.ndarray], position: int) -> np.ndarray:
        """By which group each test example is had."""
        holder = np.searchsorted([classes[-1] for classes in bounds], labels)
        if not self.test_absent:
            return holder
        away = numpy_generator(self.seed, TEST, position).integers(1, self.groups, len(labels))
        return (holder + away) % self.groups
