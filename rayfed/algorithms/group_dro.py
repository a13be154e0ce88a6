"""GroupDRO between clients: Sagawa et al. 2020, "Distributionally Robust Neural Networks for Group Shifts", Alg. 1, as
in FedDebias, appendix A.

    client:  sends f_i(w_t), the mean loss of the received model over its training data, and w_i after local training
    server:  q_i ← q_i exp(η f_i),  w_{t+1} = Σ (q_i / Σ_j q_j) w_i,  q_i = 1 before the first round

If a round samples clients, i and j range over these, and the q of the others stay. The server keeps log q, which cannot
overflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Replies, Reply, State, mean_loss
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class GroupDRO(FedAvg):
    """The loss f_i is taken over all training data of the client; released code takes its first batch."""

    name: ClassVar[str] = "group_dro"
    reference: ClassVar[str] = "Sagawa et al. 2020, Alg. 1; Guo, Tang and Lin 2022, appendix A"

    q_lr: float = option(0.01, low=0, help="η, step size of log q along the losses; 0: clients' plain mean")

    def init(self, ctx: Context) -> State:
        equal = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"log_q": equal}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept, up | {"loss": mean_loss(ctx, self.downloaded_model(ctx, client, down), data.train)}

    def next_log_q(self, server: State, replies: Sequence[Reply]) -> Tensor:
        log_q: Tensor = server["log_q"].clone()
        for reply in replies:
            log_q[reply.client] += self.q_lr * reply.up["loss"].to(log_q)
        return log_q

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        sampled = self.next_log_q(server, replies)[[reply.client for reply in replies]]
        return sampled.softmax(0).tolist()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return super().aggregate(ctx, server, replies) | {"log_q": self.next_log_q(server, replies.each)}
