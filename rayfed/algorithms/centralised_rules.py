"""Centralised methods that weigh the domains by their losses; see `centralised` for how a round is a step.

GroupDRO: Sagawa et al. 2020, Alg. 1.      v_i = q_i after q_i ← q_i exp(η f_i), normalised; q is held constant
MM-REx and V-REx: Krueger et al. 2021, "Out-of-Distribution Generalization via Risk Extrapolation", Eq. 7 and 8.
    MM-REx minimises (1 − nλ) max_i f_i + λ Σ f_i:    v_i = λ + (1 − nλ) [i has the greatest loss],  λ = λ_min
    V-REx minimises f̄ + β (1/n) Σ (f_i − f̄)²:       v_i = (1/n)(1 + 2β (f_i − f̄))
IRM: Arjovsky et al. 2019, IRMv1.          v_i = 1/n, of the clients' losses with the penalty of `irm`

V-REx and IRM begin with a small β, and start the optimiser anew when it grows, as DomainBed does.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Replies, Setting, State
from rayfed.algorithms.centralised import ERM
from rayfed.algorithms.irm import invariant
from rayfed.algorithms.loss_weighted import reported
from rayfed.errors import UsageError
from rayfed.options import option
from rayfed.task import Batch, Output
from rayfed.tree import Weights


@dataclass(frozen=True, kw_only=True)
class CentralGroupDRO(ERM):
    """As ERM; the server keeps q, too."""

    name: ClassVar[str] = "central_group_dro"
    source: ClassVar[str] = "Sagawa et al. 2020, Alg. 1"

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


@dataclass(frozen=True, kw_only=True)
class MMREx(ERM):
    """As ERM. Batch-norm statistics cannot be averaged with its negative weights."""

    name: ClassVar[str] = "mm_rex"
    source: ClassVar[str] = "Krueger et al. 2021, Eq. 7"

    lambda_min: float = option(-1.0, help="λ_min, weight of all but the worst domain, at most 1/domains, which is ERM")

    def check(self, setting: Setting) -> None:
        super().check(setting)
        domains = setting.task.num_clients
        if self.lambda_min * domains > 1 + 1e-9:
            raise UsageError(
                f"algorithm.lambda_min={self.lambda_min:g}: the weights of {domains} domains sum to 1, so the least "
                f"can be at most 1/{domains} = {1 / domains:.4g}"
            )
        if self.lambda_min < 0:
            self.refuse_averaged_statistics(setting)

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        weights = torch.full_like(losses, self.lambda_min)
        weights[losses.argmax()] += 1 - len(losses) * self.lambda_min
        return weights


@dataclass(frozen=True, kw_only=True)
class _Annealed(ERM):
    beta: float = option(10.0, low=0, help="β after the first steps; 0 is ERM then")
    beta_start: float = option(1.0, low=0, help="β in the first steps")
    anneal: int = option(500, low=0, help="steps before β changes and the optimiser starts anew")

    def beta_now(self, ctx: Context) -> float:
        return self.beta if ctx.round > self.anneal else self.beta_start

    def renews(self, ctx: Context) -> bool:
        return ctx.round == self.anneal + 1


@dataclass(frozen=True, kw_only=True)
class VREx(_Annealed):
    """As ERM. Batch-norm statistics cannot be averaged with its negative weights."""

    name: ClassVar[str] = "v_rex"
    source: ClassVar[str] = "Krueger et al. 2021, Eq. 8"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        self.refuse_averaged_statistics(setting)

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        return (1 + 2 * self.beta_now(ctx) * (losses - losses.mean())) / len(losses)


@dataclass(frozen=True, kw_only=True)
class IRM(_Annealed):
    """As ERM, with the penalty in the clients' losses."""

    name: ClassVar[str] = "irm"
    source: ClassVar[str] = "Arjovsky et al. 2019, IRMv1"

    beta: float = option(100.0, low=0, help="β, weight of the penalty after the first steps; 0 is ERM then")

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        return invariant(ctx.task, loss, output.logits, batch.y, self.beta_now(ctx)), output
