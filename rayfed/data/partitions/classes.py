"""Extreme label skew: clients with disjoint classes."""

from dataclasses import dataclass

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.draws import numpy_generator
from rayfed.data.partitions.base import ASSIGNMENT, TEST, Partition, describe_tests


@dataclass(frozen=True, kw_only=True)
class Classes(Partition):
    """One client for each group of classes of a domain; the groups are consecutive and as equal as possible.

    Two groups of seven classes are 0-3 and 4-6 (FedDebias's split of PACS). A client's test part consists of the
    domain's own test examples of its classes, or with `test_absent` of those of the other classes, which shows how a
    model treats classes that it never saw. If several clients could receive such an example, one is drawn at random.
    """

    groups: int = option(2, low=2, help="number of groups of classes, and thus of clients, in each domain")
    per_client: int | None = option(None, low=1, help="maximum of rows per client, before validation is held out")
    test_absent: bool = option(False, help="test on the classes that the client does not have")

    def test_source(self, dataset: Dataset) -> str:
        return describe_tests(dataset, None)

    def split(self, dataset: Dataset) -> list[ClientRows]:
        if self.groups > dataset.num_classes:
            raise UsageError(f"partition.groups={self.groups}: {dataset.name} has only {dataset.num_classes} classes")
        groups = np.array_split(np.arange(dataset.num_classes), self.groups)
        clients: list[ClientRows] = []
        for position, domain in enumerate(dataset.domains):
            if domain in dataset.ood:
                continue
            train, test = (dataset.rows(is_test=is_test, domain=domain) for is_test in (False, True))
            test_groups = self._test_groups(dataset.labels[test], groups, position)
            for group, classes in enumerate(groups):
                rows = train[np.isin(dataset.labels[train], classes)]
                rows = numpy_generator(self.seed, ASSIGNMENT, position, group).permutation(rows)[: self.per_client]
                if not len(rows):
                    span = f"{classes[0]}..{classes[-1]}"
                    raise UsageError(f"partition=classes: domain {domain} of {dataset.name} has no example of {span}")
                clients.append(self.client_rows(len(clients), domain, rows, test[test_groups == group]))
        return clients

    def _test_groups(self, labels: np.ndarray, groups: list[np.ndarray], position: int) -> np.ndarray:
        """Return the group of classes whose client gets each test example, [n]."""
        own_group = np.searchsorted([classes[-1] for classes in groups], labels)
        if not self.test_absent:
            return own_group
        shift = numpy_generator(self.seed, TEST, position).integers(1, self.groups, len(labels))
        return (own_group + shift) % self.groups
