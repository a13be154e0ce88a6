"""Risk extrapolation: Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation".

    MM-REx (Eq. 7):  min over θ of (1 − nλ) max_i f_i + λ Σ f_i,  λ = λ_min
        each step:   θ ← one optimiser step along Σ v_i ∇f_i(θ),  v_i = λ + (1 − nλ) [i has the largest loss]
    V-REx (Eq. 8):   min over θ of f̄ + β (1/n) Σ (f_i − f̄)²,  f̄ the mean of the n losses
        each step:   θ ← one optimiser step along Σ v_i ∇f_i(θ),  v_i = (1/n)(1 + 2β (f_i − f̄))

A round is one step of central training, see `rayfed.algorithms.centralised.erm`. In V-REx, β is `beta_start` for the
first `anneal` steps and then `beta`, with a fresh optimiser, as in DomainBed. Weights may be negative, and batch-norm
statistics cannot be averaged with negative weights: freeze batch norm.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.centralised.erm import ERM, PenalisedERM
from rayfed.algorithms.common.client_weights import check_smallest_weight
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class MMREx(ERM):
    name: ClassVar[str] = "mm_rex"
    reference: ClassVar[str] = "Krueger et al. 2021, Eq. 7"

    lambda_min: float = option(-1.0, help="λ_min, weight of all domains but the worst; at most 1/domains, which is ERM")

    @property
    def allows_negative_weights(self) -> bool:
        return self.lambda_min < 0

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_smallest_weight(self.lambda_min, problem.task.num_clients, "domains")

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        weights = torch.full_like(losses, self.lambda_min)
        weights[losses.argmax()] += 1 - len(losses) * self.lambda_min
        return weights


@dataclass(frozen=True, kw_only=True)
class VREx(PenalisedERM):
    name: ClassVar[str] = "v_rex"
    reference: ClassVar[str] = "Krueger et al. 2021, Eq. 8"

    beta: float = option(10.0, low=0, help="β after `anneal` steps; 0 is ERM then")

    @property
    def allows_negative_weights(self) -> bool:
        return True

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        return (1 + 2 * self.scheduled_beta(ctx) * (losses - losses.mean())) / len(losses)
