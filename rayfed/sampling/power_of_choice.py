"""Sampling of the clients with the highest losses."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.sampling.base import Cohort, Drawing, Sampler


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampler):
    """The clients with the highest losses among random candidates (Cho, Wang and Joshi 2020, "Power-of-Choice").

    The server draws d candidates without replacement, with probabilities proportional to their examples, and takes the
    m with the highest losses; ties are broken at random. Their updates have equal weights. With `losses=current` (the
    paper's π_pow-d) the candidates download the model and evaluate it, which counts as communication. With
    `losses=last` (π_rpow-d) they are judged by their training losses when they last took part, and those that never
    have come first. Biased towards clients with high losses: faster at first, and not to the optimum in general.
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
