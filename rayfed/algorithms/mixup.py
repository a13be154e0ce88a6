"""Mixup: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", Eq. 2, within each client's batches.

    x̃_j = λ x_j + (1−λ) x_π(j),  ỹ_j = λ y_j + (1−λ) y_π(j),  λ ~ Beta(α, α), π a permutation of the batch
    otherwise: as in `base`, which trains on (x̃, ỹ) instead of (x, y)

Mixup wraps any base, since cross-entropy with the label ỹ is λ CE(y_j) + (1−λ) CE(y_π(j)). Each batch has one λ.
DomainBed pairs examples across domains, which is impossible with one domain per client.
"""

from dataclasses import dataclass, replace

import torch

from rayfed.algorithm import Context, Delegate, Exchange, ProblemSpec, Traits
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.common.wrapper import Wrapper, innermost
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch


@dataclass(frozen=True, kw_only=True)
class Mixup(Wrapper):
    """With FedDebias as the base, the mixed x is the local x of L_con and of Eq. 6."""

    name = "mixup"
    reference = "Zhang et al. 2018 (mixup), Eq. 2; Guo, Tang and Lin 2022, appendix A"

    alpha: float = option(0.2, low=1e-6, high=1e6, help="α of the Beta distribution of λ; 1 is uniform")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        return replace(super().traits, computes_with_inputs=True, mixes_labels=True)

    def wrapped(self, exchange: Exchange) -> Exchange:
        return MixedBatches(exchange, self.alpha)

    def check(self, problem: ProblemSpec) -> None:
        base = innermost(self.base)
        if base.traits.requires_hard_labels:
            raise UsageError(f"algorithm.base={base.name}: needs integer class labels, and Mixup mixes them")
        check_real_inputs(problem, self.name)
        super().check(problem)


@dataclass(frozen=True)
class MixedBatches(Delegate):
    """An exchange with mixed training batches."""

    alpha: float

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        x, y = self.base.prepare(ctx, batch)
        distribution = torch.distributions.Beta(self.alpha, self.alpha)
        lam = float(distribution.sample())
        permutation = torch.randperm(len(x)).to(x.device, non_blocking=True)
        y = soft(y, ctx.task)
        mixed_x = lam * x + (1 - lam) * x[permutation]
        mixed_y = lam * y + (1 - lam) * y[permutation]
        return Batch(mixed_x, mixed_y)
