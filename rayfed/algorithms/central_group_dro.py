"""GroupDRO, centralised: Sagawa et al. 2020, "Distributionally Robust Neural Networks for Group Shifts", Alg. 1.

    each step:  θ ← one optimiser step along Σ q_i ∇f_i(θ),  after q_i ← q_i exp(η f_i), normalised; q is held constant

A round is a step of central training, see `erm`. The same rule between clients that train for themselves is
`group_dro`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.common.loss_weighted import reported
from rayfed.algorithms.erm import ERM
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class CentralGroupDRO(ERM):
    """As ERM; the server keeps q, too."""

    name: ClassVar[str] = "central_group_dro"
    reference: ClassVar[str] = "Sagawa et al. 2020, Alg. 1"

    q_lr: float = option(0.01, low=0, help="η, step of log q along the losses; 0 is ERM")

    def init(self, ctx: Context) -> State:
        equal = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"log_q": equal}

    def next_log_q(self, server: State, losses: Tensor) -> Tensor:
        return (server["log_q"] + self.q_lr * losses.to(server["log_q"].device)).log_softmax(0)

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        return self.next_log_q(server, losses).exp()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return super().aggregate(ctx, server, replies) | {"log_q": self.next_log_q(server, reported(replies.each)[0])}
