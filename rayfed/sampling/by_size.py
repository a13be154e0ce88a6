"""Sampling with probabilities proportional to size."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

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
