"""Centralised training on all domains at once: counterparts of federated methods in de Luca et al. 2022, section 4.1.

    each step:  a batch of every domain;  θ ← one optimiser step along Σ v_i ∇f_i(θ),  f_i the loss of domain i's batch
    erm:        v_i = 1/n,  as in DomainBed (Gulrajani and Lopez-Paz 2021)
    central_group_dro:  v_i ← v_i exp(η f_i), normalised;  v is held constant  (Sagawa et al. 2020, Alg. 1)
    mm_rex:     min over θ of (1 − nλ) max_i f_i + λ Σ f_i,  λ = λ_min  (Krueger et al. 2021, "Out-of-Distribution
                Generalization via Risk Extrapolation", Eq. 7):  v_i = λ + (1 − nλ) [i has the largest loss]
    v_rex:      min over θ of f̄ + β (1/n) Σ (f_i − f̄)²,  f̄ the mean of the n losses  (Krueger et al. 2021, Eq. 8):
                v_i = (1/n)(1 + 2β (f_i − f̄))
    irm:        v_i = 1/n,  f_i with the penalty of `fed_irm`  (Arjovsky et al. 2019, Eq. IRMv1)

A client holds a domain, and a round is one step of central training. Clients send f_i and ∇f_i of one batch at θ_t. The
server holds the optimiser (local.optimizer, local.lr, …) and takes the step. Without batch norm this is exactly central
training. With batch norm, every domain is normalised by its own batch, and running statistics are averaged over
domains. Weights of mm_rex and v_rex may be negative, and negative weights cannot average statistics: freeze batch norm.
`rounds` is the number of steps; local.epochs and local.steps have no effect.

In v_rex and irm, β is `beta_start` for the first `anneal` steps. Then it is `beta`, with a fresh optimiser, as in
DomainBed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayfed.algorithm import (
    ClientData,
    Context,
    Exchange,
    Finished,
    Phase,
    ProblemSpec,
    Replies,
    Reply,
    Retrained,
    State,
    Stepped,
)
from rayfed.algorithms.common.client_weights import (
    check_smallest_weight,
    refuse_averaged_variances,
    refuse_sampling,
    reported_losses,
)
from rayfed.algorithms.fed_irm import check_penalty, penalised_loss, penalty_option
from rayfed.algorithms.fedavg import LocalTraining
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, clone, only, zeros_like


@dataclass(frozen=True, kw_only=True)
class ERM(LocalTraining):
    name = "erm"
    reference = "Gulrajani and Lopez-Paz 2021; de Luca et al. 2022, section 4.1"
    averaged = ("gradient", "buffers")
    traits = replace(LocalTraining.traits, supports_loss_terms=False, keeps_optimizer=None)

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        """Return v [domains] for the losses [domains], both in float64."""
        return torch.full_like(losses, 1 / len(losses))

    @property
    def allows_negative_weights(self) -> bool:
        """Whether `domain_weights` may be negative."""
        return False

    def restarts_optimizer(self, ctx: Context) -> bool:
        """Return whether the optimiser starts anew before the step of this round."""
        return False

    def check(self, problem: ProblemSpec) -> None:
        policies = "aggregate or frozen"
        refuse_sampling(problem, self.name, "weighs the domains by the losses of all of them")
        if self.allows_negative_weights:
            policies = "frozen"
            refuse_averaged_variances(problem, self.name, self.personal(problem.task), alternatives=policies)
        if self.personal_weights:
            raise UsageError(f"algorithm.personal: algorithm.name={self.name} trains one central model")
        if problem.task.personal_names:
            raise UsageError(
                f"batch_norm={problem.task.batch_norm}: algorithm.name={self.name} trains one central model; use "
                f"batch_norm={policies}"
            )

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        trained = only(server["weights"], ctx.task.trainable)
        server["optimizer"] = ctx.optimizer.init(trained)
        return server

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (Phase("gradient", steps=1),)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        trained = only(work["weights"], ctx.task.trainable)
        work["gradient"] = zeros_like(trained)
        work["loss"] = torch.zeros((), device=ctx.task.device)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        if ctx.phase != "gradient":
            return super().step(ctx, work, down, batch)
        weights = work["weights"]
        trained = only(weights, ctx.task.trainable)
        grads, loss, buffers = self.loss_gradients(ctx, trained, work, down, batch)
        return work | {"weights": weights | buffers, "gradient": grads, "loss": loss}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        buffers = only(work["weights"], ctx.task.buffers)
        return client, {"gradient": work["gradient"], "buffers": buffers, "loss": work["loss"]}

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        losses = reported_losses(replies)
        return self.domain_weights(ctx, server, losses).tolist()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        weights = clone(server["weights"])
        moments = clone(server["optimizer"])
        if self.restarts_optimizer(ctx):
            moments = zeros_like(moments)
        ctx.optimizer.update_(weights, replies.mean["gradient"], moments)
        return server | {"weights": weights | replies.mean["buffers"], "optimizer": moments}

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, lambda ctx: (ctx.local,))


@dataclass(frozen=True, kw_only=True)
class CentralGroupDRO(ERM):
    name = "central_group_dro"
    reference = "Sagawa et al. 2020, Alg. 1"

    q_lr: float = option(0.01, low=0, help="η, step size of log q along the losses; 0 is ERM")

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["log_q"] = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return server

    def next_log_q(self, server: State, losses: Tensor) -> Tensor:
        """Return the log of v [domains] after a step along the losses [domains]."""
        log_q = server["log_q"]
        log_q = log_q + self.q_lr * losses.to(log_q.device)
        return log_q.log_softmax(0)

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        return self.next_log_q(server, losses).exp()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        losses = reported_losses(replies.each)
        log_q = self.next_log_q(server, losses)
        return super().aggregate(ctx, server, replies) | {"log_q": log_q}


@dataclass(frozen=True, kw_only=True)
class MMREx(ERM):
    name = "mm_rex"
    reference = "Krueger et al. 2021, Eq. 7"

    lambda_min: float = option(-1.0, help="λ_min, weight of all domains but the worst; at most 1/domains, which is ERM")

    @property
    def allows_negative_weights(self) -> bool:
        return self.lambda_min < 0

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_smallest_weight(self.lambda_min, problem.task.num_clients, "domains")

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        domains = len(losses)
        weights = torch.full_like(losses, self.lambda_min)
        weights[losses.argmax()] += 1 - domains * self.lambda_min
        return weights


@dataclass(frozen=True, kw_only=True)
class PenalisedERM(ERM):
    """ERM with a penalty. Its weight β changes after some steps, when the optimiser starts anew."""

    beta: float = option(100.0, low=0, help="β, weight of the penalty after `anneal` steps; 0 is ERM then")
    beta_start: float = option(1.0, low=0, help="β in the first steps")
    anneal: int = option(500, low=0, help="steps until β changes and the optimiser starts anew")

    def scheduled_beta(self, ctx: Context) -> float:
        """Return β in the round of `ctx`."""
        return self.beta if ctx.round > self.anneal else self.beta_start

    def restarts_optimizer(self, ctx: Context) -> bool:
        return ctx.round == self.anneal + 1


@dataclass(frozen=True, kw_only=True)
class VREx(PenalisedERM):
    name = "v_rex"
    reference = "Krueger et al. 2021, Eq. 8"

    beta: float = option(10.0, low=0, help="β after `anneal` steps; 0 is ERM then")

    @property
    def allows_negative_weights(self) -> bool:
        return True

    def domain_weights(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        beta = self.scheduled_beta(ctx)
        deviations = losses - losses.mean()
        return (1 + 2 * beta * deviations) / len(losses)


@dataclass(frozen=True, kw_only=True)
class IRM(PenalisedERM):
    name = "irm"
    reference = "Arjovsky et al. 2019, IRMv1"

    penalty: str = penalty_option()

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_penalty(problem, self.penalty)

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        beta = self.scheduled_beta(ctx)
        loss = penalised_loss(ctx.task, self.penalty, beta, loss, weights, output, batch.y)
        return loss, output
