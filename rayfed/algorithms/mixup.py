"""Mixup: Zhang et al. 2018, "mixup: Beyond Empirical Risk Minimization", Eq. 2, inside each client's own batches.

    x̃_j = λ x_j + (1−λ) x_π(j),  ỹ_j = λ y_j + (1−λ) y_π(j),  λ ~ Beta(α, α), π a permutation of the batch
    all else: as `base`, which is given (x̃, ỹ) wherever it would see (x, y)

A wrapper: cross-entropy with the label ỹ is λ CE(y_j) + (1−λ) CE(y_π(j)). One λ for a batch. DomainBed pairs examples
across domains; with one domain per client nothing would be left to pair.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import Context, Delegate, Exchange, ProblemSpec
from rayfed.algorithms.common.soft_labels import check_real_inputs, check_soft_labels, soft
from rayfed.algorithms.common.wrapper import Wrapper, innermost
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch


@dataclass(frozen=True, kw_only=True)
class Mixup(Wrapper):
    """Sends, keeps and is scored as its base; with FedDebias the mixed x is the local x of L_con and of Eq. 6."""

    name: ClassVar[str] = "mixup"
    reference: ClassVar[str] = "Zhang et al. 2018 (mixup), Eq. 2; Guo, Tang and Lin 2022, appendix A"

    alpha: float = option(0.2, low=1e-6, high=1e6, help="α of the Beta distribution of λ; 1: uniform")

    def wrapped(self, exchange: Exchange) -> Exchange:
        return MixedBatches(exchange, self.alpha)

    def check(self, problem: ProblemSpec) -> None:
        base = innermost(self.base)
        if base.requires_hard_labels:
            raise UsageError(f"algorithm.base={base.name}: needs whole classes as labels, and Mixup mixes them")
        check_soft_labels(problem, self.name)
        check_real_inputs(problem, self.name)
        super().check(problem)


@dataclass(frozen=True)
class MixedBatches(Delegate):
    """An exchange whose training batches are mixed."""

    alpha: float

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        x, y = self.base.prepare(ctx, batch)
        share = float(torch.distributions.Beta(self.alpha, self.alpha).sample())
        other = torch.randperm(len(x)).to(x.device)
        y = soft(y, ctx.task.num_classes)
        return Batch(share * x + (1 - share) * x[other], share * y + (1 - share) * y[other])
