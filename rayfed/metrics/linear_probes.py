"""Accuracy of a new linear head on frozen representations.

The new head is FRAug's case study (Chen et al. 2023, section 3.2). The paper trains a model on 10 % of each client's
data, and then its head alone on 100 % of them. Here the same takes partition.validation=0.9 and `fit` = train and val.
The head is multinomial logistic regression, one for each client, trained to its optimum, where the paper takes steps of
SGD.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rayfed.core.options import option
from rayfed.metrics.base import OfRepresentations, Representations, Value


@dataclass(frozen=True, kw_only=True)
class HeadAccuracy(OfRepresentations):
    """`head_accuracy`: each client's accuracy on `split` of logistic regression (scikit-learn's, on standardised
    representations) fitted to its `fit` parts. Clients without examples of both have no value."""

    higher_is_better = True

    fit: list[str] = option(
        ["train"], choices=("train", "val"), help="parts of a client's data that its head is fitted to"
    )
    penalty: float = option(1.0, above=0, help="weight of the L2 penalty")
    examples: int = option(
        20000, low=2, help="examples in all of each part, the same number of each client where it has as many"
    )

    @property
    def splits(self) -> frozenset[str]:
        return frozenset({self.split, *self.fit})

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        for test in groups:
            fit = [g for g in groups if g.client == test.client and g.split in self.fit]
            if test.split != self.split or not fit:
                continue
            (z, y), (test_z, test_y) = _joined(fit), _joined([test])
            if len(np.unique(y)) == 1:  # logistic regression needs two classes
                predictions = np.full(len(test_y), y[0])
            else:
                head = make_pipeline(StandardScaler(), LogisticRegression(C=1 / self.penalty, max_iter=500))
                predictions = head.fit(z, y).predict(test_z)
            yield test.client, test.domain, Value("head_accuracy", float(np.mean(predictions == test_y)), len(test_y))


def _joined(groups: Sequence[Representations]) -> tuple[np.ndarray, np.ndarray]:
    z, y = torch.cat([group.z for group in groups]), torch.cat([group.y for group in groups])
    return z.cpu().numpy(), y.cpu().numpy()
