"""The setup of DBE: everyone's mean feature is collected and averaged, and the average is handed to everyone, once.

collect:   ordinary local training of the base from its first state, without bias and regulariser; sends m_i;
           z̄ = Σ_i n_i m_i / Σ_i n_i; all else that this training changed is dropped
hand out:  z̄ goes to every client, which keeps it; nobody trains
unseen clients: z̄ is handed out to them, and no mean is collected
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rayfed.algorithm import (
    ClientData,
    Context,
    Delegate,
    Exchange,
    Phase,
    Privacy,
    Replies,
    State,
    represent,
)
from rayfed.algorithms.common.dbe_model import BIAS, CONSENSUS, MEAN, MeanRegulariser
from rayfed.algorithms.common.wrapper import Wrapper, derived
from rayfed.algorithms.ditto import PERSONAL
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import without


@dataclass(frozen=True, kw_only=True)
class Consensus(Wrapper):
    init_mean: str = option("running", choices=("running", "full"), help="what is sent: m_i, or the mean over all data")
    noise_scale: float = option(0.0, low=0, help="s, standard deviation of the noise on the mean that is sent")
    noise_mix: float = option(0.0, low=0, high=1, help="q, share of the mean that is taken away before the noise")

    regularises = derived(lambda self: True)

    def wrapped(self, exchange: Exchange) -> Exchange:
        return WithRegulariser(exchange, self)

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        own = (CollectMeans(self.base.round_exchanges[0], self), SendConsensus()) if self.regularises else ()
        return (*super().setup_exchanges, *own)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        """No guarantee of the base covers the means that the clients send."""
        return None if self.regularises else super().privacy_spent(ctx, server)

    def restarted(self, client: State) -> State:
        """Return the client's state with a new running mean."""
        if not self.regularises:
            return client
        return client | {"weights": client["weights"] | {MEAN: torch.zeros_like(client["weights"][MEAN])}}


def without_regulariser(task: Task) -> Task:
    """Return the task with a regulariser that only tracks the running mean."""
    task = copy.copy(task)
    task.terms = tuple(replace(t, kappa=0.0) if isinstance(t, MeanRegulariser) else t for t in task.terms)
    return task


@dataclass(frozen=True)
class WithRegulariser(Delegate):
    """An exchange of the base. The running mean starts anew in each round; personal models are not regularised."""

    method: Consensus

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(ctx, without(server, ("consensus",)))

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, self.method.restarted(client) if ctx.exchange == 0 else client, down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        if ctx.phase == PERSONAL:
            ctx = ctx.at(task=without_regulariser(ctx.task))
        return super().step(ctx, work, down, batch)


@dataclass(frozen=True)
class CollectMeans(Delegate):
    """Setup: every client trains once from the initial model, without bias and regulariser, and sends its mean.

    Nothing else of this training is kept. Unseen clients do not train.
    """

    method: Consensus

    averaged = ("mean",)
    server_side_weighting = False

    def _plain(self, ctx: Context) -> Context:
        task = without_regulariser(ctx.task)
        task.trainable = tuple(name for name in task.trainable if name != BIAS)
        return ctx.at(task=task, exchange=0)

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(self._plain(ctx), without(server, ("consensus",)))

    def unicast(self, ctx: Context, server: State) -> State:
        return super().unicast(self._plain(ctx), server)

    def weight(self, ctx: Context, examples: int) -> float:
        return float(examples)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return () if ctx.unseen else super().phases(self._plain(ctx))

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(self._plain(ctx), self.method.restarted(client), down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        return super().step(self._plain(ctx), work, down, batch)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        method = self.method
        full = method.init_mean == "full"
        mean = represent(ctx, work["weights"], data.train).mean(0) if full else work["weights"][MEAN]
        return client, {"mean": (1 - method.noise_mix) * mean + method.noise_scale * torch.randn_like(mean)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"consensus": replies.mean["mean"]}


class SendConsensus(Exchange):
    """Setup: every client receives the consensus and keeps it."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"consensus": server["consensus"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"weights": client["weights"] | {CONSENSUS: down["consensus"]}}, {}
