"""IRM, centralised: Arjovsky et al. 2019, Eq. IRMv1.

    each step:  θ ← one optimiser step along the mean over domains of ∇[f_i + β g_i²] / max(β, 1),
                g_i = ∂ f_i(w · logits)/∂w at w = 1

A round is one step of central training, see `rayfed.algorithms.centralised.erm`. β is `beta_start` for the first
`anneal` steps and then `beta`, with a fresh optimiser, as in DomainBed. `fed_irm` has the same penalty for clients that
train locally. The code of de Luca et al. 2022 squares the gradient with respect to the last layer's weights instead of
g_i (`penalty=weights`).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.centralised.erm import PenalisedERM
from rayfed.algorithms.fed_irm import check_penalty, penalised_loss, penalty_option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class IRM(PenalisedERM):
    name: ClassVar[str] = "irm"
    reference: ClassVar[str] = "Arjovsky et al. 2019, IRMv1"

    penalty: str = penalty_option()

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_penalty(problem, self.penalty)

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        beta = self.scheduled_beta(ctx)
        return penalised_loss(ctx.task, self.penalty, beta, loss, weights, output, batch.y), output
