"""Fréchet distance between distributions of representations: Heusel et al. 2017, "GANs Trained by a Two Time-Scale
Update Rule", Eq. 6, on the model's own representations in place of Inception's.

    d² = ‖m₁ − m₂‖² + tr(C₁ + C₂ − 2 (C₁ C₂)^½)

with means m and covariances C (divided by n − 1). Inception's features would give the FID. Other features give other
numbers, so compare values between runs with the same network, and not with the FID of a paper.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from rayfed.metrics.base import OfRepresentations, Representations, Value


class Frechet(OfRepresentations):
    """`frechet`: the distance of each client (and test set) from all together, as the ADCOL paper's FID of its parties.
    `frechet_mean`: the mean over them."""

    higher_is_better = False

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        parts = [group.z.cpu().numpy().astype(np.float64) for group in groups]
        pooled, distances = np.concatenate(parts), []
        for group, part in zip(groups, parts, strict=True):
            if len(part) > 1:
                distances.append(frechet_distance(part, pooled))
                yield group.client, group.domain, Value("frechet", distances[-1], len(part))
        if distances:
            yield -1, "", Value("frechet_mean", float(np.mean(distances)), len(pooled))


def frechet_distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared Fréchet distance of the Gaussians fitted to `a` [n, d] and `b` [m, d], 2 rows or more each."""
    from scipy import linalg  # takes half a second

    ca, cb = (np.atleast_2d(np.cov(x, rowvar=False)) for x in (a, b))
    # tr (C₁ C₂)^½ sums the square roots of the eigenvalues of C₁^½ C₂ C₁^½, which is symmetric: no complex parts
    values, vectors = linalg.eigh(ca)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    cross = np.sqrt(linalg.eigvalsh(root @ cb @ root).clip(0)).sum()
    distance = np.square(a.mean(0) - b.mean(0)).sum() + np.trace(ca) + np.trace(cb) - 2 * cross
    return float(max(distance, 0.0))
