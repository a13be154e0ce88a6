"""MM-REx: Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation", Eq. 7.

    min over θ of (1 − nλ) max_i f_i + λ Σ f_i,  λ = λ_min
    each step:  θ ← one optimiser step along Σ v_i ∇f_i(θ),  v_i = λ + (1 − nλ) [i has the greatest loss]

A round is a step of central training, see `erm`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.erm import ERM
from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class MMREx(ERM):
    """As ERM. Batch-norm statistics cannot be averaged with its negative weights: with batch norm, freeze it."""

    name: ClassVar[str] = "mm_rex"
    reference: ClassVar[str] = "Krueger et al. 2021, Eq. 7"

    lambda_min: float = option(-1.0, help="λ_min, weight of all but the worst domain, at most 1/domains, which is ERM")

    @property
    def extrapolates(self) -> bool:
        return self.lambda_min < 0

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        domains = problem.task.num_clients
        if self.lambda_min * domains > 1 + 1e-9:
            raise UsageError(
                f"algorithm.lambda_min={self.lambda_min:g}: the weights of {domains} domains sum to 1, so the least "
                f"can be at most 1/{domains} = {1 / domains:.4g}"
            )

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        weights = torch.full_like(losses, self.lambda_min)
        weights[losses.argmax()] += 1 - len(losses) * self.lambda_min
        return weights
