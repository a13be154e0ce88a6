"""Differential privacy of clients: every update is clipped, and noise hides any one client.

    client:   Δ_i ← Δ_i · min(1, C / ‖Δ_i‖),  over all that it sends together
    server:   mean of the m updates of a round + noise, whose scale is z times the most that one client can change

What one client can change, and who are neighbours, follows from how clients are sampled:

    fixed cohorts:            a client is replaced by another: 2C/m.  Sampling is not counted as amplification.
    sampling.name=poisson:    a client is added or removed: the sum of the updates is divided by the expected number
                              qN, not by m: C/(qN).  Each client takes part with probability q, which amplifies.
    local=true:               each client adds the noise itself, before anything else sees its update: 2C.

The unit is a client with all its data. The server must not learn anything else, so that methods that send more, or
weigh clients by their examples, are refused.

Adaptive clipping moves C towards a quantile γ of the norms of updates. Each client sends b_i = 1 if ‖Δ_i‖ ≤ C, and

    C ← C · exp(−η (b − γ)),   b = mean b_i + noise of standard deviation σ_b/m

Of the noise multiplier z, the bits take a part: z_Δ = (z⁻² − (s/σ_b)⁻²)^(−1/2), with s = 1/2 where a client is added or
removed, as in the paper, and 1 where it is replaced.

With `noise_cohort`, the noise is that of a deployment with the same sampling rate and a larger cohort. It is smaller
than what these cohorts need, so that ε holds for that deployment and not for this simulation.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from rayfed.channel.accounting import check_budget, epsilon_spent, noise_multiplier
from rayfed.channel.mechanisms import laplace_like
from rayfed.core.errors import UsageError
from rayfed.core.options import option

REPLACED = "replace a client"
ADDED = "add or remove a client"
"""The notions of neighbouring federations."""


class Composition(NamedTuple):
    """How often a mechanism runs on the data of a client: in how many `steps`, each with probability `rate`."""

    rate: float
    steps: int


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """Base class of mechanisms. Derive your own from it and declare its options as fields."""

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    order: ClassVar[int] = 2
    """The norm that is clipped: 1 or 2."""
    counts_sampling: ClassVar[bool] = True
    """Whether ε counts that a client takes part with a probability below 1."""

    clip: float = option(1.0, above=0, help="C, bound of the norm of an update; with a quantile, the first one")
    local: bool = option(False, help="clients add the noise, for a server that is not trusted")
    noise_cohort: int | None = option(
        None, low=1, help="clients in a cohort of a larger deployment, for which the noise is scaled; null: this one"
    )

    def multiplier(self, how: Composition) -> float:
        """Return z, the scale of the noise over the most that one client can change; 0: no noise."""
        raise NotImplementedError

    def spent(self, multiplier: float, so_far: Composition) -> float | None:
        """Return the ε that so many steps have spent; None without a guarantee."""
        raise NotImplementedError

    def noise_like(self, x: Tensor, scale: float) -> Tensor:
        """Draw noise in the shape of `x`, on the CPU, so that it does not depend on where `x` is."""
        raise NotImplementedError

    def check(self, how: Composition, clients: int) -> None:
        """Raise UsageError if no noise is enough, or if options do not go together."""

    def note(self, how: Composition) -> str:
        """Return what is guaranteed, in one line."""
        raise NotImplementedError

    @property
    def failure(self) -> float:
        """δ."""
        return 0.0

    @property
    def accounting(self) -> str:
        """The name of the accountant."""
        return "sum"

    @property
    def adapts(self) -> bool:
        """Whether the clipping bound changes."""
        return False

    @property
    def depends_on_rounds(self) -> bool:
        """Whether the noise depends on how many rounds there are."""
        return True


@dataclass(frozen=True, kw_only=True)
class Gaussian(Privacy):
    """Gaussian noise of standard deviation σ times the most, in L2, that one client can change.

    Give `sigma`, or `epsilon` for the least σ with which all rounds together satisfy (ε, δ). With sigma=0, updates are
    clipped alone, without a guarantee.
    """

    name: ClassVar[str] = "gaussian"
    reference: ClassVar[str] = "McMahan et al. 2018, Alg. 1; Andrew et al. 2021, Alg. 1 (quantile)"

    epsilon: float | None = option(None, low=1e-6, help="ε of all rounds together, in place of sigma")
    delta: float | None = option(None, above=0, below=1, help="δ, less than one over the number of clients")
    sigma: float | None = option(None, low=0, help="noise multiplier σ, in place of epsilon; 0: clip alone")
    accountant: str = option("rdp", choices=("rdp", "prv"), help="Rényi, or tighter: privacy loss, up to 1 s a round")
    quantile: float | None = option(
        None, above=0, below=1, help="γ, share of updates that shall be within the bound; null: a fixed bound"
    )
    clip_lr: float = option(0.2, above=0, help="η, learning rate of the bound, with a quantile")
    bits_noise: float | None = option(
        None, above=0, help="σ_b, noise on the number of updates within the bound; null: a twentieth of the cohort"
    )

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.sigma is None):
            raise UsageError("privacy: give epsilon or sigma, and not both, such as privacy.epsilon=8")
        if self.delta is None and self.sigma != 0:
            raise UsageError("privacy.delta: needed for a guarantee, such as 1e-5; less than one over the clients")
        if self.local and self.quantile is not None:
            raise UsageError("privacy.quantile: needs a trusted server; leave it out, or privacy.local")

    def multiplier(self, how: Composition) -> float:
        if self.sigma is not None:
            return self.sigma
        assert self.epsilon is not None, "one of them is given"
        return noise_multiplier(self.epsilon, self.failure, rate=how.rate, steps=how.steps, accountant=self.accountant)

    def spent(self, multiplier: float, so_far: Composition) -> float | None:
        if not multiplier:
            return None
        return epsilon_spent(multiplier, self.failure, rate=so_far.rate, steps=so_far.steps, accountant=self.accountant)

    def noise_like(self, x: Tensor, scale: float) -> Tensor:
        return (scale * torch.randn_like(x, device="cpu")).to(x.device)

    def check(self, how: Composition, clients: int) -> None:
        if self.delta is not None and self.delta * clients >= 1:
            raise UsageError(
                f"privacy.delta={self.delta:g}: must be less than one over the number of clients, {1 / clients:.3g}; "
                "otherwise publishing one of them would satisfy it"
            )
        if self.epsilon is not None:
            check_budget(self.epsilon, self.failure, how.steps, rate=how.rate, where="privacy")

    def note(self, how: Composition) -> str:
        sigma = self.multiplier(how)
        if not sigma:
            return "updates are clipped, without noise: there is no guarantee"
        epsilon = self.spent(sigma, how)
        return f"ε={epsilon:.4g} at δ={self.failure:g} by {self.accountant}, Gaussian noise with σ={sigma:.4g}"

    def noise_on_bits(self, cohort: int) -> float:
        """Return σ_b for a cohort."""
        if self.bits_noise is None:
            return cohort / 20
        return self.bits_noise

    def bits_sensitivity(self, is_poisson: bool) -> float:
        """Return s, the most that a client can change the sum of bits − 1/2."""
        if is_poisson:
            return 0.5
        return 1.0

    def of_updates(self, sigma: float, bits_noise: float, sensitivity: float) -> float:
        """Return z_Δ, the noise multiplier that is left for the updates beside the bits.

        Args:
            sigma: z, that of both together.
            bits_noise: σ_b.
            sensitivity: s, the most that a client can change the number of updates within the bound.

        Raises:
            UsageError: The bits alone would spend more.
        """
        if not sigma:
            return 0.0
        rest = sigma**-2 - (sensitivity / bits_noise) ** 2
        if rest <= 0:
            raise UsageError(
                f"privacy.bits_noise={bits_noise:g}: must be more than {sensitivity * sigma:.4g} for a noise "
                f"multiplier of {sigma:.4g}; give more, or a larger cohort"
            )
        return float(rest**-0.5)

    @property
    def failure(self) -> float:
        return self.delta or 0.0

    @property
    def accounting(self) -> str:
        return self.accountant

    @property
    def adapts(self) -> bool:
        return self.quantile is not None

    @property
    def depends_on_rounds(self) -> bool:
        return self.epsilon is not None

    def next_bound(self, bound: Tensor, within: float) -> Tensor:
        """Return the next clipping bound; `within` is the noisy share of updates within the present one."""
        assert self.quantile is not None, "the bound adapts"
        return bound * math.exp(-self.clip_lr * (within - self.quantile))


@dataclass(frozen=True, kw_only=True)
class Laplace(Privacy):
    """Laplace noise of scale b = s/ε_round on every number, with s the most, in L1, that one client can change.

    ε is divided evenly over the rounds in which a client can take part. δ is 0.
    """

    name: ClassVar[str] = "laplace"
    reference: ClassVar[str] = "Dwork et al. 2006; Li, He and Song 2023, table 17 (local)"
    order: ClassVar[int] = 1
    counts_sampling: ClassVar[bool] = False

    epsilon: float = option(low=1e-6, help="ε of all rounds together")

    def multiplier(self, how: Composition) -> float:
        return how.steps / self.epsilon

    def spent(self, multiplier: float, so_far: Composition) -> float | None:
        return so_far.steps / multiplier

    def noise_like(self, x: Tensor, scale: float) -> Tensor:
        return laplace_like(x, scale)

    def note(self, how: Composition) -> str:
        each = self.epsilon / how.steps
        return f"ε={self.epsilon:g}, {each:.4g} in each of {how.steps} rounds that a client can be in, Laplace noise"
