"""AFL: Mohri et al. 2019, "Agnostic Federated Learning"; Gen-AFL: de Luca et al. 2022, "Mitigating Data Heterogeneity
in Federated Learning with Data Augmentation", Alg. 1 and Prop. 1.

    min over θ, max over λ in Δ(λ_min) of Σ λ_i f_i(θ),   Δ(λ_min) = {Σ λ_i = 1, λ_i ≥ λ_min};  AFL: λ_min = 0
    client:  sends f_i(θ_t) over its augmented training set, and θ^(i) after training from θ_t
    server:  λ ← n_i/N in the first round, then λ ← Π(λ + η_λ f(θ_t));  θ_{t+1} = Σ λ_i θ^(i)

The papers update λ after aggregation, with the losses of the new model, which takes a second exchange. Here clients
send these losses with their reply in the next round. In de Luca et al.'s code λ_min is never passed on, so its Gen-AFL
is AFL.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, Replies, Reply, State, mean_loss
from rayfed.algorithms.common.client_weights import (
    NEEDS_ALL_LOSSES,
    check_smallest_weight,
    project_simplex,
    refuse_averaged_variances,
    refuse_sampling,
    reported_losses,
)
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class AFL(FedAvg):
    name: ClassVar[str] = "afl"
    reference: ClassVar[str] = "Mohri et al. 2019; de Luca et al. 2022, Alg. 1 with lambda_min = 0"

    lambda_lr: float = option(0.1, low=0, help="η_λ, step size of the clients' weights along their losses")
    lambda_min: float = option(0.0, help="smallest weight of a client, at most 1/clients")

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, NEEDS_ALL_LOSSES)
        if self.lambda_min < 0:
            refuse_averaged_variances(problem, self.name, self.personal(problem.task))
        check_smallest_weight(self.lambda_min, problem.task.num_clients, "clients")

    def init(self, ctx: Context) -> State:
        unknown = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"lambda": unknown}  # n_i comes with the first replies

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept, up | {"loss": mean_loss(ctx, self.downloaded_model(ctx, client, down), data.as_trained)}

    def next_lambda(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Tensor:
        losses, shares = reported_losses(replies)
        if ctx.round <= 1:
            return shares
        return project_simplex(server["lambda"] + self.lambda_lr * losses, self.lambda_min)

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        return self.next_lambda(ctx, server, replies).tolist()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return super().aggregate(ctx, server, replies) | {"lambda": self.next_lambda(ctx, server, replies.each)}


@dataclass(frozen=True, kw_only=True)
class GenAFL(AFL):
    """AFL whose weights may be negative."""

    name: ClassVar[str] = "gen_afl"
    reference: ClassVar[str] = "de Luca et al. 2022, Alg. 1 and Prop. 1"

    lambda_min: float = option(-1.0, help="smallest weight of a client, at most 1/clients; 0 is AFL")
