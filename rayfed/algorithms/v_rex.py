"""V-REx: Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation", Eq. 8.

    min over θ of f̄ + β (1/n) Σ (f_i − f̄)²,  f̄ the mean of the n losses
    each step:  θ ← one optimiser step along Σ v_i ∇f_i(θ),  v_i = (1/n)(1 + 2β (f_i − f̄))

A round is a step of central training, see `erm`. β is `beta_start` for the first `anneal` steps, then `beta`, with a
fresh optimiser, as in DomainBed.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.algorithms.common.penalty_schedule import Annealed


@dataclass(frozen=True, kw_only=True)
class VREx(Annealed):
    """As ERM. Batch-norm statistics cannot be averaged with its negative weights: with batch norm, freeze it."""

    name: ClassVar[str] = "v_rex"
    reference: ClassVar[str] = "Krueger et al. 2021, Eq. 8"

    @property
    def extrapolates(self) -> bool:
        return True

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        return (1 + 2 * self.beta_now(ctx) * (losses - losses.mean())) / len(losses)
