"""Samplers that prefer some clients: by their losses, their importance, or their numbers of examples."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
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


@dataclass(frozen=True, kw_only=True)
class BySize(Sampler):
    """Sampling by numbers of examples, with replacement (Li et al. 2020, "On the Convergence of FedAvg", Scheme I).

    Each of m draws picks client i with its share of the examples p_i. A client that is picked k_i times trains once and
    counts k_i times: f_i = k_i / (m p_i). For methods that weight clients by their examples, the aggregate is the plain
    mean over the m draws, as in the paper. Unbiased. A round may have fewer clients than m.
    """

    reweights: ClassVar[bool] = True

    def draw(self, at: Drawing) -> Cohort:
        counts = at.rng.multinomial(at.size, at.shares)
        clients = np.flatnonzero(counts)
        return Cohort(clients.tolist(), (counts[clients] / (at.size * at.shares[clients])).tolist())


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampler):
    """The clients with the highest losses among random candidates (Cho, Wang and Joshi 2020, "Power-of-Choice").

    The server draws d candidates without replacement, with probabilities proportional to their examples, and takes the
    m with the highest losses; ties are broken at random. Their updates have equal weights. With `losses=current` (the
    paper's π_pow-d) the candidates download the model and evaluate it, which counts as communication. With
    `losses=last` (π_rpow-d) the server compares the training losses of their last rounds; clients that never took part
    come first. Biased towards clients with high losses: faster at first, and not to the optimum in general.
    """

    reweights: ClassVar[bool] = True

    candidates: int | None = option(
        None, low=1, help="candidates d per round, at least the cohort; null: twice the cohort, or all clients"
    )
    losses: str = option(
        "current",
        choices=("current", "last"),
        help="current: the candidates evaluate the model (π_pow-d); last: their last training losses (π_rpow-d)",
    )

    def check(self, size: int, clients: int) -> None:
        if self.candidates is not None and not size <= self.candidates <= clients:
            raise UsageError(
                f"sampling.candidates={self.candidates}: give at least the cohort ({size}) and at most the number of "
                f"clients ({clients})"
            )

    def draw(self, at: Drawing) -> Cohort:
        clients = len(at.shares)
        number = min(2 * at.size, clients) if self.candidates is None else self.candidates
        candidates = at.rng.choice(clients, number, replace=False, p=at.shares)  # the random order breaks ties
        if self.losses == "current":
            losses = at.losses(sorted(candidates.tolist()))[np.argsort(np.argsort(candidates))]
        else:
            losses = np.nan_to_num(at.last_losses[candidates], nan=np.inf)
        highest = candidates[np.argsort(-losses, kind="stable")[: at.size]]
        return Cohort(sorted(highest.tolist()), equal=True)
