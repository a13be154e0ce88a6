"""DBE's exchanges: the consensus of the setup, and rounds with the mean regulariser."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, Phase, Replies, State, represent
from rayfed.algorithms.dbe.model import BIAS, CONSENSUS, MEAN, tracking_only
from rayfed.algorithms.ditto import PERSONAL
from rayfed.core.task import Batch
from rayfed.core.trees import without


@dataclass(frozen=True)
class RegularisedExchange(Delegate):
    """An exchange of the base with the mean regulariser.

    The running mean starts anew in each round. Training of a personal model beside the one that is sent is not
    regularised.
    """

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(ctx, without(server, ("consensus",)))

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, restarted(client) if ctx.exchange == 0 else client, down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        if ctx.phase == PERSONAL:
            ctx = ctx.at(task=tracking_only(ctx.task))
        return super().step(ctx, work, down, batch)


@dataclass(frozen=True, kw_only=True)
class CollectMeans(Delegate):
    """Setup, first exchange: every client trains as in a round without bias and regulariser, and sends its mean."""

    full: bool
    noise_scale: float
    noise_mix: float

    @property
    def averaged(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("mean",)

    @property
    def server_side_weighting(self) -> bool:
        return False

    def weight(self, ctx: Context, examples: int) -> float:
        return float(examples)

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(unbiased(ctx), server)

    def unicast(self, ctx: Context, server: State) -> State:
        return super().unicast(unbiased(ctx), server)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return () if ctx.unseen else super().phases(unbiased(ctx))

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(unbiased(ctx), restarted(client), down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        return super().step(unbiased(ctx), work, down, batch)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        mean = represent(ctx, work["weights"], data.train).mean(0) if self.full else work["weights"][MEAN]
        return client, {"mean": (1 - self.noise_mix) * mean + self.noise_scale * torch.randn_like(mean)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"consensus": replies.mean["mean"]}


class SendConsensus(Exchange):
    """Setup, second exchange: every client receives the consensus and keeps it."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"consensus": server["consensus"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"weights": client["weights"] | {CONSENSUS: down["consensus"]}}, {}


def restarted(client: State) -> State:
    """Return the client's state with a running mean of 0."""
    weights: dict[str, Any] = client["weights"]
    return client | {"weights": weights | {MEAN: torch.zeros_like(weights[MEAN])}}


def unbiased(ctx: Context) -> Context:
    """Return the context of training without the bias and without the regulariser, as in a round's first exchange."""
    task = tracking_only(ctx.task)
    task.trainable = tuple(name for name in task.trainable if name != BIAS)
    return ctx.at(task=task, exchange=0)
