"""Centralised training on all domains at once, the twins of federated methods in de Luca et al. 2022, section 4.1, as
DomainBed (Gulrajani and Lopez-Paz 2021) trains them: ERM, and the base of the others.

    each step:  a batch of every domain;  θ ← one optimiser step along Σ v_i ∇f_i(θ),  f_i a batch's loss, v the rule's

Here a client holds a domain and a round is a step: clients send f_i and ∇f_i of one batch at θ_t, and the server, which
holds the optimiser (local.optimizer, local.lr, …), takes the step. For a model without batch norm that is central
training exactly; with it, every domain is normalised by its own batch and the running statistics are means over the
domains. `rounds` is the number of steps; local.epochs and local.steps do not matter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, Phase, ProblemSpec, Replies, Reply, State
from rayfed.algorithms.common.loss_weighted import LossWeighted, reported
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, clone, only, tree_map, zeros_like


@dataclass(frozen=True, kw_only=True)
class ERM(LossWeighted):
    """Sends a batch's gradient and loss; the server keeps the optimiser. Scored: the global model. v_i = 1/n: each
    domain counts alike, whatever its size."""

    name: ClassVar[str] = "erm"
    reference: ClassVar[str] = "Gulrajani and Lopez-Paz 2021; de Luca et al. 2022, section 4.1"
    averaged: ClassVar[tuple[str, ...]] = ("gradient", "buffers")
    supports_loss_terms: ClassVar[bool] = False
    without_averages: ClassVar[str] = "frozen"  # clients keep nothing

    keep_optimizer: bool = field(default=False, init=False)  # no key: the server's optimiser always goes on

    def rule(self, ctx: Context, server: State, losses: Tensor) -> Tensor:
        """v [domains], of the losses [domains] in float64."""
        return torch.full_like(losses, 1 / len(losses))

    def renews(self, ctx: Context) -> bool:
        """Whether the optimiser starts anew before this round's step."""
        return False

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if problem.task.personal:
            fitting = "frozen" if self.extrapolates else "aggregate or frozen"
            raise UsageError(
                f"batch_norm={problem.task.batch_norm}: algorithm.name={self.name} has one central model and leaves "
                f"nothing with clients; use batch_norm={fitting}"
            )

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"optimizer": ctx.optimizer.init(only(server["weights"], ctx.task.trainable))}

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (Phase("gradient", steps=1),)

    @property
    def adaptation(self) -> Exchange:
        return LocalTraining(self)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        trained = only(work["weights"], ctx.task.trainable)
        return work | {"gradient": zeros_like(trained), "loss": torch.zeros((), device=ctx.task.device)}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        if ctx.phase != "gradient":
            return super().step(ctx, work, down, batch)
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.loss(ctx, weights | trained, work, down, batch)
            return value, output.buffers

        grads, loss, buffers = gradients(objective, only(weights, ctx.task.trainable))
        return work | {"weights": weights | buffers, "gradient": grads, "loss": loss}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        buffers = only(work["weights"], ctx.task.model.buffers)
        return client, {"gradient": work["gradient"], "buffers": buffers, "loss": work["loss"]}

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        return self.rule(ctx, server, reported(replies)[0]).tolist()

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        weights, moments = clone(server["weights"]), clone(server["optimizer"])
        if self.renews(ctx):
            moments = tree_map(torch.zeros_like, moments)
        ctx.optimizer.update_(weights, replies.mean["gradient"], moments)
        return server | {"weights": weights | replies.mean["buffers"], "optimizer": moments}


@dataclass(frozen=True)
class LocalTraining(Delegate):
    """Adaptation: the local training that the configuration asks for."""

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (ctx.local,)
