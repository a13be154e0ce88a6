"""Client sampling: which clients take part in a round, and with which weights.

With full participation, the server would aggregate Σ_i w_i x_i over all N clients. Here w_i is the method's own weight,
by default the client's share of the examples, and x_i what the client sends. A sampler draws a cohort S and may give
each client a factor f_i. Then the server aggregates

    Σ_{i∈S} f_i w_i x_i + (1 − Σ_{i∈S} f_i w_i) x,

where x is what it has sent to the clients under the same name, so that a model is moved and not rescaled. If
E[f_i 1{i∈S}] = 1 for all i, the expectation is that of full participation. Running statistics are averaged with weights
proportional to f_i w_i, since extrapolated variances could be negative.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What a sampler may look at in a round. Arrays have one entry per participant, in their order.

    Attributes:
        round: The number of the round, from 1.
        size: How many clients to draw, less than N.
        shares: Each client's share of all training examples [N]; they sum to 1.
        last_losses: The mean training loss of each client in its last round [N], which it reports with its update; NaN
            if it never took part.
        rng: The random numbers of this round.
        rng_of_cycle: rng_of_cycle(n): random numbers that n rounds in a row share.
        losses: losses(clients): the mean loss of what each of these clients would download now, on its training data,
            in the order of `clients`. The clients download it for that, which is counted as communication.
    """

    round: int
    size: int
    shares: np.ndarray
    last_losses: np.ndarray
    rng: np.random.Generator
    rng_of_cycle: Callable[[int], np.random.Generator]
    losses: Callable[[Sequence[int]], np.ndarray]


class Cohort(NamedTuple):
    """The clients of a round.

    Attributes:
        clients: Their positions among the participants, each once.
        factors: The f_i of each client; None: the method's own weights, normalised over the cohort.
        equal: Whether all clients have the same weight instead.
        stand_in: Whether nobody was drawn, so that the one client stands in, and the server keeps what it has.
    """

    clients: Sequence[int]
    factors: Sequence[float] | None = None
    equal: bool = False
    stand_in: bool = False


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """Base class of all samplers. A user's own sampler derives from it and declares its options as fields."""

    reweights: ClassVar[bool] = False
    """Whether cohorts have `factors` or equal weights; only methods that average support these."""
    is_even: ClassVar[bool] = False
    """Whether all clients take part equally often, whatever they have or report."""
    varies: ClassVar[bool] = False
    """Whether a cohort may have more clients than `Drawing.size`."""

    def check(self, size: int, clients: int) -> None:
        """Raise a `UsageError` if cohorts of `size` cannot be drawn from that many `clients`."""

    def draw(self, at: Drawing) -> Cohort:
        """Return the cohort of a round: at least one client, and at most `at.size` unless the size `varies`.

        It must depend on nothing but `at`. Draw random numbers from `at.rng` alone.
        """
        raise NotImplementedError


class Uniform(Sampler):
    """Every client with the same probability, without replacement (McMahan et al. 2017, Alg. 1)."""

    is_even: ClassVar[bool] = True

    def draw(self, at: Drawing) -> Cohort:
        clients = at.rng.choice(len(at.shares), at.size, replace=False)
        return Cohort(sorted(clients.tolist()))


class BySize(Sampler):
    """Sampling by numbers of examples, with replacement (Li et al. 2020, "On the Convergence of FedAvg", Scheme I).

    Each of m draws picks client i with its share of the examples p_i. A client that is picked k_i times trains once and
    counts k_i times: f_i = k_i / (m p_i). For methods that weight clients by their examples, the aggregate is the
    paper's: the plain mean over the m draws. Unbiased. A round may have fewer clients than m.
    """

    reweights = True

    def draw(self, at: Drawing) -> Cohort:
        counts = at.rng.multinomial(at.size, at.shares)
        clients = np.flatnonzero(counts)
        factors = counts[clients] / (at.size * at.shares[clients])
        return Cohort(clients.tolist(), factors.tolist())


class WithoutReplacement(Sampler):
    """Every client once in ⌊N/m⌋ rounds, in an order drawn anew each time; N mod m clients then take no part.

    A client takes part less often than by chance, which counts where every participation costs privacy.
    """

    is_even: ClassVar[bool] = True

    def draw(self, at: Drawing) -> Cohort:
        clients = len(at.shares)
        turn = (at.round - 1) % (clients // at.size)
        order = at.rng_of_cycle(clients // at.size).permutation(clients)
        return Cohort(sorted(order[turn * at.size : (turn + 1) * at.size].tolist()))


class Poisson(Sampler):
    """Every client by itself, with the probability q = m/N, so that the size of a cohort varies around m.

    Accounting of differential privacy counts on it (McMahan et al. 2018; Mironov, Talwar and Zhang 2019). If nobody is
    drawn, one client stands in, and what it sends has no weight.
    """

    is_even: ClassVar[bool] = True
    varies: ClassVar[bool] = True

    def draw(self, at: Drawing) -> Cohort:
        clients = len(at.shares)
        drawn = np.flatnonzero(at.rng.random(clients) < at.size / clients).tolist()
        if drawn:
            return Cohort(drawn)
        return Cohort([int(at.rng.integers(clients))], stand_in=True)


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Sampler):
    """The clients with the highest losses among random candidates (Cho, Wang and Joshi 2020, "Power-of-Choice").

    The server draws d candidates without replacement, with probabilities proportional to their examples, and takes the
    m with the highest losses; ties are broken at random. Their updates have equal weights. With `losses=current` (the
    paper's π_pow-d) the candidates download the model and evaluate it, which counts as communication. With
    `losses=last` (π_rpow-d) the server compares the training losses of their last rounds; clients that never took part
    come first. Biased towards clients with high losses: faster at first, and not to the optimum in general.
    """

    reweights = True

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
            raise UsageError(f"sampling.candidates={self.candidates}: expected {size} (cohort) to {clients} (clients)")

    def draw(self, at: Drawing) -> Cohort:
        clients = len(at.shares)
        number = self.candidates
        if number is None:
            number = min(2 * at.size, clients)
        candidates = at.rng.choice(clients, number, replace=False, p=at.shares)  # the random order breaks ties
        if self.losses == "current":
            in_order = np.sort(candidates)
            losses = at.losses(in_order.tolist())[np.searchsorted(in_order, candidates)]
        else:
            losses = np.nan_to_num(at.last_losses[candidates], nan=np.inf)
        by_loss = candidates[np.argsort(-losses, kind="stable")]
        highest = by_loss[: at.size]
        return Cohort(sorted(highest.tolist()), equal=True)


UNIFORM = Uniform()
WITHOUT_REPLACEMENT = WithoutReplacement()
