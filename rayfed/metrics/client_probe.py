"""How well a linear classifier tells from a representation which client it belongs to.

Where representations do not depend on the domain, as ADCOL aims for, no classifier does better than chance.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from rayfed.core.options import option
from rayfed.metrics.base import OfRepresentations, Representations, Value


@dataclass(frozen=True, kw_only=True)
class ClientProbe(OfRepresentations):
    """`client_probe`: the cross-validated accuracy of multinomial logistic regression (scikit-learn's) on standardised
    representations, with the client as the label. `client_probe_chance`: the accuracy of always naming the client with
    the most examples."""

    higher_is_better = False  # representations that do not depend on the client are the aim

    folds: int = option(3, low=2, help="folds of the cross-validation")
    penalty: float = option(1.0, above=0, help="weight of the L2 penalty")

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        groups = [group for group in groups if len(group.z) >= self.folds]
        if len(groups) < 2:
            return
        z = np.concatenate([group.z.cpu().numpy() for group in groups])
        labels = np.repeat(np.arange(len(groups)), [len(group.z) for group in groups])
        probe = make_pipeline(StandardScaler(), LogisticRegression(C=1 / self.penalty, max_iter=500))
        folds = StratifiedKFold(self.folds, shuffle=True, random_state=seed)
        accuracy = float(cross_val_score(probe, z, labels, cv=folds).mean())
        yield -1, "", Value("client_probe", accuracy, len(z))
        yield -1, "", Value("client_probe_chance", float(np.bincount(labels).max() / len(z)), len(z))
