"""IRM, centralised: Arjovsky et al. 2019, "Invariant Risk Minimization", Eq. IRMv1.

    each step:  θ ← one optimiser step along the mean over domains of ∇[f_i + β g_i²] / max(β, 1),
                g_i = ∂ f_i(w · logits)/∂w at w = 1

A round is a step of central training, see `erm`. β is `beta_start` for the first `anneal` steps, then `beta`, with a
fresh optimiser, as in DomainBed. The same penalty between clients that train for themselves is `fed_irm`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.algorithms.common.invariance import invariant
from rayfed.algorithms.common.penalty_schedule import Annealed
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class IRM(Annealed):
    """As ERM, with the penalty in the clients' losses."""

    name: ClassVar[str] = "irm"
    reference: ClassVar[str] = "Arjovsky et al. 2019, IRMv1"

    beta: float = option(100.0, low=0, help="β, weight of the penalty after the first steps; 0 is ERM then")

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        return invariant(ctx.task, loss, output.logits, batch.y, self.beta_now(ctx)), output
