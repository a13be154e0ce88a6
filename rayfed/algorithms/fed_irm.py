"""Fed-IRM: the penalty IRMv1 of Arjovsky et al. 2019, "Invariant Risk Minimization", in the clients' losses, as in de
Luca et al. 2022 (Gen-AFL), Alg. 3.

    client:  min over θ of [f_i(θ) + β g_i²] / max(β, 1),  g_i = ∂ f_i(w · logits)/∂w at w = 1
    server:  FedAvg

With cross-entropy, g_i is the mean of ⟨softmax(o), o⟩ − o_y. g_i² is taken of the batch, as in Alg. 3, which is too
large in expectation; DomainBed multiplies the g_i of two half batches. The authors' code squares the gradient of f_i
with respect to the last layer's weights instead (`penalty=weights`). β is `beta_start` for the first `anneal` updates
and then `beta`, with a fresh optimiser. This change is DomainBed's, and the division by β is that of the authors' code;
Alg. 3 prints neither.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, State
from rayfed.algorithms.common.invariance import check_penalty, penalised_loss, penalty_option
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, tree_map


@dataclass(frozen=True, kw_only=True)
class FedIRM(FedAvg):
    name: ClassVar[str] = "fed_irm"
    reference: ClassVar[str] = "Arjovsky et al. 2019, IRMv1; de Luca et al. 2022, Alg. 3"

    beta: float = option(100.0, low=0, help="β, weight of the penalty after `anneal` updates; 0 is FedAvg then")
    beta_start: float = option(1.0, low=0, help="β in the first updates")
    anneal: int = option(500, low=0, help="updates of a client before β changes")
    penalty: str = penalty_option()

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_penalty(problem, self.penalty)

    def join(self, ctx: Context) -> State:
        return super().join(ctx) | {"updates": torch.zeros((), dtype=torch.long, device=ctx.task.device)}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, client, down) | {"updates": client["updates"]}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        beta = torch.where(work["updates"] < self.anneal, self.beta_start, self.beta)
        return penalised_loss(ctx.task, self.penalty, beta, loss, weights, output, batch.y), output

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        restarts = work["updates"] == self.anneal
        moments = tree_map(lambda value: torch.where(restarts, torch.zeros_like(value), value), work["optimizer"])
        work, metrics = super().step(ctx, work | {"optimizer": moments}, down, batch)
        return work | {"updates": work["updates"] + 1}, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept | {"updates": work["updates"]}, up
