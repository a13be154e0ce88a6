"""Robust rules: what the server takes in place of the mean of the updates u_1 … u_n; f of them may be attackers'.

A rule returns the update of the cohort. Rules that choose or weigh whole updates need the inner products of the updates
alone, n² numbers. Rules by coordinate look at a block of coordinates of all clients at a time.

`sensitivity` says how far replacing one update changes the result in L2, if no update is longer than C. Noise for
differential privacy is scaled by it. Only the mean divides it by n: a rule that picks one update gives that client a
say as large as that of the whole cohort.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import State
from rayfed.channel.updates import Updates, distances
from rayfed.core.options import option
from rayfed.core.trees import named_tensors


def _byzantine() -> Any:
    return option(
        None,
        low=0,
        help="f, attackers in a cohort that the rule tolerates; null: as many as the attack has on average",
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Base class of robust rules. Derive your own from it and declare its options as fields."""

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    gathers: ClassVar[bool] = True
    """Whether the server needs all updates of a cohort at once, and not their sum."""

    def least(self, byzantine: int) -> int:
        """Return the least number of clients with which the rule tolerates that many attackers."""
        return 1

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        """Return (the fields in place of the mean, what the next round finds as `memory`).

        `updates.combined`, `updates.each` and `updates.mean` make the fields.
        """
        raise NotImplementedError

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return the most that one of n `clients` can change by another update of norm `bound`; None if unknown."""
        return None


@dataclass(frozen=True, kw_only=True)
class Mean(Rule):
    """The mean with the method's own weights, which tolerates no attacker."""

    name: ClassVar[str] = "mean"
    reference: ClassVar[str] = "the method's own mean"
    gathers: ClassVar[bool] = False

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        return updates.mean(), memory

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2C/n: an update of norm C takes the place of its opposite, with the weight 1/n."""
        return 2 * bound / clients


@dataclass(frozen=True, kw_only=True)
class NormBound(Mean):
    """The mean of updates that are scaled down to an L2 norm of at most `bound`."""

    name: ClassVar[str] = "norm_bound"
    reference: ClassVar[str] = "Sun et al. 2019, Can You Really Backdoor Federated Learning?"

    bound: float = option(1.0, above=0, help="largest L2 norm of an update")

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        return 2 * min(bound, self.bound) / clients


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Rule):
    """In every coordinate the mean without the f smallest and the f largest values."""

    name: ClassVar[str] = "trimmed_mean"
    reference: ClassVar[str] = "Yin et al. 2018, Definition 2"

    byzantine: int | None = _byzantine()

    def least(self, byzantine: int) -> int:
        return 2 * byzantine + 1

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        return updates.each(lambda u: _trimmed(u, byzantine)), memory

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2C√n / (n − 2f).

        In coordinate j, one value moves the sum of the middle ones by at most the range of values, 2 max_i |u_ij|. The
        sum over j of max_i u_ij² is at most Σ_i ‖u_i‖² = nC².
        """
        return 2 * bound * math.sqrt(clients) / (clients - 2 * byzantine)


@dataclass(frozen=True, kw_only=True)
class Median(Rule):
    """The median of every coordinate; of an even number of values, the mean of the middle two."""

    name: ClassVar[str] = "median"
    reference: ClassVar[str] = "Yin et al. 2018, Definition 1"

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        trim = (len(updates) - 1) // 2
        return updates.each(lambda u: _trimmed(u, trim)), memory

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return that of the trimmed mean of the middle values."""
        return 2 * bound * math.sqrt(clients) / (clients - 2 * ((clients - 1) // 2))


def _trimmed(values: Tensor, trim: int) -> Tensor:
    """Return the mean [numbers] of the values [clients, numbers] without the `trim` smallest and largest."""
    return _sorted(values)[trim : len(values) - trim].mean(0)


def _sorted(values: Tensor) -> Tensor:
    """Return values [clients, numbers], sorted by coordinate. On a CPU, NumPy takes an eighth of torch's time."""
    if values.device.type == "cpu" and values.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.sort(values.numpy(), axis=0))
    return values.sort(0).values


@dataclass(frozen=True, kw_only=True)
class Krum(Rule):
    """The mean of the `multi` updates with the least score: the sum of squared distances to the n − f − 2 nearest
    others."""

    name: ClassVar[str] = "krum"
    reference: ClassVar[str] = "Blanchard et al. 2017, section 4 (Krum) and appendix (Multi-Krum)"

    byzantine: int | None = _byzantine()
    multi: int = option(1, low=1, help="updates that are averaged; more than 1: Multi-Krum")

    def least(self, byzantine: int) -> int:
        return max(2 * byzantine + 3, self.multi)

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        scores = krum_scores(distances(updates.products()), byzantine)
        chosen = scores.argsort(stable=True)[: self.multi]
        coefficients = torch.zeros(len(updates), dtype=torch.float64)
        coefficients[chosen] = 1 / self.multi
        return updates.combined(coefficients), memory

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2C: another update may make the rule choose others, all in the ball of radius C."""
        return 2 * bound


def krum_scores(distances: Tensor, byzantine: int) -> Tensor:
    """Return the scores [n] of Krum, given the squared distances [n, n]; the nearest others are at least one."""
    n = len(distances)
    nearest = max(1, n - byzantine - 2)
    others = distances + torch.diag(torch.full((n,), math.inf, dtype=distances.dtype))
    return others.sort(1).values[:, :nearest].sum(1)


@dataclass(frozen=True, kw_only=True)
class Bulyan(Rule):
    """Krum chooses n − 2f updates, one after the other; in every coordinate, the n − 4f values nearest to their median
    are averaged."""

    name: ClassVar[str] = "bulyan"
    reference: ClassVar[str] = "El Mhamdi, Guerraoui and Rouault 2018, section 4"

    byzantine: int | None = _byzantine()

    def least(self, byzantine: int) -> int:
        return 4 * byzantine + 3

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        chosen = self._chosen(distances(updates.products()), byzantine)
        kept = len(updates) - 4 * byzantine
        return updates.each(lambda u: _around_median(u[chosen], kept)), memory

    def _chosen(self, squared: Tensor, byzantine: int) -> list[int]:
        left = list(range(len(squared)))
        chosen: list[int] = []
        for _ in range(len(squared) - 2 * byzantine):
            if len(left) > 1:
                scores = krum_scores(squared[left][:, left], byzantine)
            else:
                scores = torch.zeros(1)
            chosen.append(left.pop(int(scores.argmin())))
        return chosen

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2C√(n − 2f): every coordinate of the result lies among those of the n − 2f chosen updates."""
        return 2 * bound * math.sqrt(clients - 2 * byzantine)


def _around_median(values: Tensor, kept: int) -> Tensor:
    """Return the mean [numbers] of the `kept` values [clients, numbers] nearest to the median of each coordinate."""
    ordered = _sorted(values)
    gaps = (ordered - _trimmed(values, (len(values) - 1) // 2)).abs()
    nearest = gaps.argsort(dim=0, stable=True)[:kept]
    return ordered.gather(0, nearest).mean(0)


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Rule):
    """argmin_v Σ_i p_i ‖v − u_i‖ with the method's weights p_i, by the smoothed algorithm of Weiszfeld:

    v ← Σ_i β_i u_i / Σ_i β_i,   β_i = p_i / max(ν, ‖v − u_i‖),  from the mean on
    """

    name: ClassVar[str] = "geometric_median"
    reference: ClassVar[str] = "Pillutla, Kakade and Harchaoui 2022 (RFA), Alg. 2"

    smoothing: float = option(1e-6, above=0, help="ν, least distance")
    iterations: int = option(100, low=1, help="most steps; they end earlier where v no longer moves")

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        return updates.combined(self.coefficients(updates.products(), updates.shares)), memory

    def coefficients(self, products: Tensor, shares: Tensor) -> Tensor:
        """Return the coefficients c [n] of v = Σ_i c_i u_i, given the inner products of the updates [n, n]."""
        coefficients = shares
        for _ in range(self.iterations):
            apart = _distances_to(products, coefficients)
            nearness = shares / apart.clamp(min=self.smoothing)
            before = coefficients
            coefficients = nearness / nearness.sum()
            if torch.allclose(before, coefficients, rtol=0, atol=1e-12):
                break
        return coefficients

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2C: the median lies in the convex hull of the updates, in the ball of radius C."""
        return 2 * bound


def _distances_to(products: Tensor, coefficients: Tensor) -> Tensor:
    """Return ‖u_i − Σ_j c_j u_j‖ [n], given the inner products of all u."""
    across = products @ coefficients
    squares: Tensor = (products.diagonal() - 2 * across + coefficients @ across).clamp(min=0)
    return squares.sqrt()


@dataclass(frozen=True, kw_only=True)
class CentredClipping(Rule):
    """v ← v + Σ_i p_i (u_i − v) min(1, τ / ‖u_i − v‖), `iterations` times, from the v of the last round on.

    The paper weighs all clients equally; here they have the method's weights p_i.
    """

    name: ClassVar[str] = "centred_clipping"
    reference: ClassVar[str] = "Karimireddy, He and Jaggi 2021, Alg. 1 and 2"

    radius: float = option(1.0, above=0, help="τ, largest distance from v that counts")
    iterations: int = option(1, low=1, help="steps in a round")

    def combine(self, updates: Updates, byzantine: int, memory: State) -> tuple[State, State]:
        centre = []
        for _, value in named_tensors(memory):
            centre.append(value)
        further = []
        if centre:
            further = [centre]
        own, of_centre = self._coefficients(updates.products(*further), updates.shares)
        places = iter(centre)

        def of_block(u: Tensor) -> Tensor:
            moved: Tensor = torch.tensordot(own.to(u), u, 1)
            if centre:
                return moved + of_centre * next(places).to(u)
            return moved

        kept: list[Tensor] = []

        def keep(u: Tensor) -> Tensor:
            kept.append(of_block(u))
            return kept[-1]

        mean = updates.each(keep)
        return mean, {"centre": kept}

    def _coefficients(self, products: Tensor, shares: Tensor) -> tuple[Tensor, float]:
        """Return the coefficients [n] of the updates in v, and that of the last round's v, which is the last row."""
        n = len(shares)
        coefficients = torch.zeros(len(products), dtype=torch.float64)
        coefficients[n:] = 1.0
        for _ in range(self.iterations):
            apart = _distances_to(products, coefficients)[:n]
            factors = shares * (self.radius / apart.clamp(min=1e-30)).clamp(max=1)
            coefficients = coefficients * (1 - factors.sum())
            coefficients[:n] += factors
        return coefficients[:n], float(coefficients[n:].sum())

    def sensitivity(self, bound: float, clients: int, byzantine: int) -> float | None:
        """Return 2τL/n for L iterations and equal weights.

        A step moves v by the mean of n vectors of norm τ at most, and v + clip(u − v) does not increase distances.
        """
        return 2 * self.radius * self.iterations / clients
