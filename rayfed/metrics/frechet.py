"""How far the distributions of representations lie apart: Heusel et al. 2017, "GANs Trained by a Two Time-Scale Update
Rule", Eq. 6, on the model's own representations in place of Inception's.

    d² = ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁ C₂)^½)

with means m and covariances C (with n − 1). Inception's features would give the FID; other features give other numbers,
so values compare between runs with one network and not with a paper's FID.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import linalg

from rayfed.metrics.base import OfRepresentations, Representations, Value


@dataclass(frozen=True, kw_only=True)
class Frechet(OfRepresentations):
    """`frechet`: of every client (and test set) against all together, as the ADCOL paper's FID of its parties, and
    `frechet_mean`, the mean over them."""

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        parts = [group.z.cpu().numpy().astype(np.float64) for group in groups]
        whole, found = np.concatenate(parts), []
        for group, own in zip(groups, parts, strict=True):
            if len(own) > 1:
                found.append(frechet(own, whole))
                yield group.client, group.domain, Value("frechet", found[-1], len(own))
        if found:
            yield -1, "", Value("frechet_mean", float(np.mean(found)), len(whole))


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """The squared Fréchet distance of the Gaussians fitted to `a` [n, d] and `b` [m, d]; at least 2 rows each."""
    ca, cb = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    # tr (C₁ C₂)^½ by the square roots of the eigenvalues of C₁^½ C₂ C₁^½, which is symmetric: no complex remainders
    values, vectors = linalg.eigh(ca)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(linalg.eigvalsh(root @ cb @ root).clip(0)).sum()
    distance = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(ca) + np.trace(cb) - 2 * cross
    return float(max(distance, 0.0))
