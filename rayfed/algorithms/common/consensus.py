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

from rayfed.algorithm import ClientData, Context, Phase, Privacy, Replies, Reply, State, represent
from rayfed.algorithms.common.dbe_model import BIAS, CONSENSUS, MEAN, MeanRegulariser
from rayfed.algorithms.common.wrapper import Wrapper, derived
from rayfed.algorithms.ditto import PERSONAL
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import without


@dataclass(frozen=True, kw_only=True)
class Consensus(Wrapper):
    init_mean: str = option("running", choices=("running", "full"), help="what is sent: m_i, or the mean over all data")
    noise_scale: float = option(0.0, low=0, help="s, standard deviation of the noise on the mean that is sent")
    noise_mix: float = option(0.0, low=0, high=1, help="q, share of the mean that is taken away before the noise")

    regularises = derived(lambda self: True)
    averaged = derived(lambda self: (*self.base.averaged, "mean"))
    setup_exchanges = derived(lambda self: self.base.setup_exchanges + 2 * self.regularises)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        """No promise of the base's covers the means that the clients send."""
        return None if self.regularises else super().privacy_spent(ctx, server)

    def _stage(self, ctx: Context) -> str:
        own = ctx.trip - self.base.setup_exchanges
        return ("collect", "hand out")[own] if ctx.stage == "setup" and own >= 0 else "base"

    def _seen(self, ctx: Context) -> Context:
        """The context that the base sees: the collection is a round like any other."""
        collects = self._stage(ctx) == "collect"
        if not collects and ctx.phase != PERSONAL:
            return ctx
        task = copy.copy(ctx.task)
        task.loss_terms = tuple(replace(t, kappa=0.0) if isinstance(t, MeanRegulariser) else t for t in task.loss_terms)
        if not collects:
            return ctx.at(task=task)
        task.trainable = tuple(name for name in task.trainable if name != BIAS)
        return ctx.at(stage="round", trip=0, task=task)

    def broadcast(self, ctx: Context, server: State) -> State:
        if self._stage(ctx) == "hand out":
            return {"consensus": server["consensus"]}
        return super().broadcast(self._seen(ctx), without(server, ("consensus",)))

    def unicast(self, ctx: Context, server: State) -> State:
        return {} if self._stage(ctx) == "hand out" else super().unicast(self._seen(ctx), server)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        stage = self._stage(ctx)
        idle = stage == "hand out" or (stage == "collect" and ctx.unseen)
        return () if idle else super().phases(self._seen(ctx))

    def start(self, ctx: Context, client: State, down: State) -> State:
        if self._stage(ctx) == "hand out":
            return {}
        if self.regularises and self._seen(ctx).trip == 0:  # m_i starts anew
            client = client | {"weights": client["weights"] | {MEAN: torch.zeros_like(client["weights"][MEAN])}}
        return super().start(self._seen(ctx), client, down)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        return super().step(self._seen(ctx), work, down, batch)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        stage = self._stage(ctx)
        if stage == "hand out":
            return client | {"weights": client["weights"] | {CONSENSUS: down["consensus"]}}, {}
        if stage == "base":
            return super().finish(ctx, work, client, down, data)
        full = self.init_mean == "full"
        mean = represent(ctx, work["weights"], data.train).mean(0) if full else work["weights"][MEAN]
        return client, {"mean": (1 - self.noise_mix) * mean + self.noise_scale * torch.randn_like(mean)}

    def weight(self, ctx: Context, examples: int) -> float:
        return super().weight(ctx, examples) if self._stage(ctx) == "base" else float(examples)

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        if self._stage(ctx) == "base":
            return super().weights(ctx, server, replies)
        return [reply.examples / sum(each.examples for each in replies) for reply in replies]

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        stage = self._stage(ctx)
        if stage == "base":
            return super().aggregate(ctx, server, replies)
        return server | {"consensus": replies.mean["mean"]} if stage == "collect" else server
