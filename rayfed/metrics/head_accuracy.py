"""What a linear head, trained anew, makes of frozen representations: FRAug's case study (Chen et al. 2023, 3.2).

There a model is trained on 10 % of each client's data, and then its head alone on 100 % of them. Here: with
partition.validation=0.9 and `fit` = train and val. The head is multinomial logistic regression, each client's own,
and at its optimum, where the paper takes steps of SGD.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rayfed.core.options import option
from rayfed.metrics.base import OfRepresentations, Representations, Value


@dataclass(frozen=True, kw_only=True)
class HeadAccuracy(OfRepresentations):
    """`head_accuracy`: each client's accuracy on `split` of logistic regression (scikit-learn's, on standardised
    representations) fitted to its `fit` parts. Clients without examples of both have none."""

    fit: list[str] = option(["train"], choices=("train", "val"), help="parts of a client's data that its head learns")
    penalty: float = option(1.0, above=0, help="weight of the L2 penalty")
    examples: int = option(
        20000, low=2, help="examples in all of each part, the same number of each client where it has as many"
    )

    @property
    def splits(self) -> frozenset[str]:
        return frozenset({self.split, *self.fit})

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        for test in groups:
            own = [g for g in groups if g.client == test.client and g.split in self.fit]
            if test.split != self.split or not own:
                continue
            z, y = _joined(own)
            seen, expected = _joined([test])
            if len(np.unique(y)) == 1:  # nothing to learn: the one class is the answer
                answers = np.full(len(expected), y[0])
            else:
                head = make_pipeline(StandardScaler(), LogisticRegression(C=1 / self.penalty, max_iter=500))
                answers = head.fit(z, y).predict(seen)
            yield test.client, test.domain, Value("head_accuracy", float(np.mean(answers == expected)), len(expected))


def _joined(groups: Sequence[Representations]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.concatenate([group.z.cpu().numpy() for group in groups]),
        np.concatenate([group.y.cpu().numpy() for group in groups]),
    )
