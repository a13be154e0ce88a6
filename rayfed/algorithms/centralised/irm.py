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
from rayfed.algorithms.centralised.erm import ERM
from rayfed.algorithms.centralised.penalty_schedule import beta_changes, scheduled_beta
from rayfed.algorithms.common.invariance import check_penalty, penalised_loss, penalty_option
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class IRM(ERM):
    name: ClassVar[str] = "irm"
    reference: ClassVar[str] = "Arjovsky et al. 2019, IRMv1"

    beta: float = option(100.0, low=0, help="β, weight of the penalty after `anneal` steps; 0 is ERM then")
    beta_start: float = option(1.0, low=0, help="β in the first steps")
    anneal: int = option(500, low=0, help="steps until β changes and the optimiser starts anew")
    penalty: str = penalty_option()

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_penalty(problem, self.penalty)

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        beta = scheduled_beta(self, ctx)
        return penalised_loss(ctx.task, self.penalty, beta, loss, weights, output, batch.y), output

    def restarts_optimizer(self, ctx: Context) -> bool:
        return beta_changes(self, ctx)
