"""Samplers that prefer some clients: by their losses or their numbers of examples."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.sampling.base import Cohort, Drawing, Sampler


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
