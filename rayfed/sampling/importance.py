"""Importance sampling with unbiased weights."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.options import option
from rayfed.sampling.base import Cohort, Drawing, Sampler


@dataclass(frozen=True, kw_only=True)
class Importance(Sampler):
    """Importance sampling with unbiased weights (Chen, Horváth and Richtárik 2020, "Optimal Client Sampling", Eq. 7).

    Client i takes part with probability π_i = min(1, c u_i), where c is such that Σ π_i is the size of the cohort, and
    has the factor 1 / π_i. These probabilities minimise the variance of the aggregate if u_i is the norm of the
    client's weighted update w_i U_i. The paper computes those norms, for which all clients have to train in every
    round. Here u_i = p_i L_i stands in for them, with the client's share of the examples p_i and its loss L_i. The
    aggregate is unbiased for any u_i > 0. The paper draws clients independently; here the cohort has a fixed size, by
    systematic sampling in random order (Madow 1949), with the same π_i.
    """

    reweights: ClassVar[bool] = True

    by: str = option(
        "last_loss",
        choices=("last_loss", "loss", "size"),
        help="L_i: the training loss when the client last took part (the mean of the others if it never has); the loss "
        "of the present model, which all clients evaluate; or 1",
    )
    explore: float = option(
        0.1, above=0, high=1, help="share of u_i that is the same for all clients, so that no weight explodes"
    )

    def draw(self, at: Drawing) -> Cohort:
        importance: np.ndarray = at.shares * self._losses(at)
        total = importance.sum()
        uniform = np.full(len(at.shares), 1 / len(at.shares))
        mixed = uniform if not total > 0 else (1 - self.explore) * importance / total + self.explore * uniform
        probabilities = inclusion_probabilities(mixed, at.size)
        clients = systematic_sample(probabilities, at.size, at.rng)
        return Cohort(clients.tolist(), (1 / probabilities[clients]).tolist())

    def _losses(self, at: Drawing) -> np.ndarray:
        if self.by == "size":
            return np.ones(len(at.shares))
        if self.by == "loss":
            losses = at.losses(range(len(at.shares)))
        else:
            known = np.isfinite(at.last_losses)
            typical = at.last_losses[known].mean() if known.any() else 1.0
            losses = np.where(known, at.last_losses, typical)
        return losses.clip(min=0.0)


def inclusion_probabilities(importance: np.ndarray, size: int) -> np.ndarray:
    """Return min(1, c u_i) for positive u [N], with c such that they sum to `size` ≤ N (Chen et al. 2020, Eq. 7)."""
    order = np.argsort(-importance, kind="stable")
    ordered = importance[order]
    rest = np.cumsum(ordered[::-1])[::-1]  # Σ of this and all smaller ones
    certain = 0  # clients that take part in any case
    while certain < size and (size - certain) * ordered[certain] >= rest[certain]:
        certain += 1
    probabilities = np.ones(len(importance))
    if certain < len(importance):
        probabilities[order[certain:]] = (size - certain) * ordered[certain:] / rest[certain]
    return np.minimum(probabilities, 1.0)


def systematic_sample(probabilities: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return `size` positions in ascending order, i with probability π_i, where Σ π_i is `size` (Madow 1949).

    The probabilities are laid end to end in random order, and the points u, u + 1, … with a random u < 1 pick those on
    which they fall.
    """
    order = rng.permutation(len(probabilities))
    ends = np.cumsum(probabilities[order])
    points = (rng.random() + np.arange(size)) * (ends[-1] / size)  # the sum has a rounding error
    return np.sort(order[np.minimum(np.searchsorted(ends, points, side="right"), len(order) - 1)])
