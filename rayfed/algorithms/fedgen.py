"""FedGen: Zhu, Hong and Zhou 2021, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", Alg. 1,
as DBE's authors run it (PFLlib): without the original's divergence and diversity terms.

    setup:   every client sends how many examples of each class it trains on
    client:  θ_i ← θ_i − η ∇[CE(x, y) + CE(h_i(G(ŷ, ε)), ŷ)],  ŷ drawn from the pooled counts, ε ~ U[0, 1)^noise
    server:  θ = Σ p_i θ_i;  G ← Adam steps on CE(Σ p_i h_i(G(ŷ, ε)), ŷ),  with the heads that were sent

G goes to the clients from round 2 on, once it has been trained. It normalises by the batch at hand on both sides, and
its Adam moments go on from round to round. What of a head never travels (DBE's bias, a local batch norm) has its
initial value wherever a generated feature goes through it: the server has no other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.feature_generator import GeneratorServer
from rayfed.core.errors import UsageError
from rayfed.core.optim import Adam
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights, only, stack, tree_map, without


@dataclass(frozen=True, kw_only=True)
class FedGen(GeneratorServer):
    """Sends its model (the head as a field of its own, since the server needs each) and, once, its class counts; gets
    the model, the generator and the pooled counts. Scored is the server's model."""

    name: ClassVar[str] = "fedgen"
    reference: ClassVar[str] = "Zhu, Hong and Zhou 2021, Alg. 1, in PFLlib's form"
    logged_scalars: ClassVar[tuple[str, ...]] = ("generator_loss",)

    def check(self, problem: ProblemSpec) -> None:
        if not self.head(problem.task):
            raise UsageError(f"algorithm.name={self.name}: the model needs a split point with weights in its head")
        if problem.batch_size == 1:
            raise UsageError("local.batch_size=1: algorithm.name=fedgen cannot train its batch norm on one example")

    def init(self, ctx: Context) -> State:
        classes, generator = ctx.task.num_classes, ctx.task.modules["generator"].draw_weights()
        return super().init(ctx) | {
            "generator": generator,
            "moments": Adam(lr=self.server_lr).init(generator),
            "counts": torch.zeros(classes, device=ctx.task.device),
            "rounds": torch.zeros((), dtype=torch.long, device=ctx.task.device),  # that the generator was trained in
        }

    def broadcast(self, ctx: Context, server: State) -> State:
        down = super().broadcast(ctx, server)
        return down | only(server, ("generator", "counts")) if int(server["rounds"]) else down

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (CollectClassCounts(),)

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        value, output = super().loss(ctx, weights, work, down, batch)
        if "generator" not in down:
            return value, output
        with torch.no_grad():
            y, features = self.generated(ctx, down["generator"], down["counts"])
        return value + ctx.task.loss(ctx.task.head(weights | self.as_sent(ctx.task), features), y), output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        names = self.head(ctx.task)
        return kept, {"weights": without(up["weights"], names), "head": only(up["weights"], names)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        device = ctx.task.device
        heads = stack([tree_map(lambda leaf: leaf.to(device), reply.up["head"]) for reply in replies.each])
        shares = torch.tensor([float(self.weight(ctx, reply.examples)) for reply in replies.each], device=device)
        shares = shares / shares.sum()
        found = replies.mean["weights"] | {name: _mean(value, shares) for name, value in heads.items()}
        generator, moments, loss = self.train_generator(ctx, server, heads, shares)
        return server | {
            "weights": {name: found[name] for name in server["weights"]},
            "generator": generator,
            "moments": moments,
            "generator_loss": loss,
            "rounds": server["rounds"] + 1,
        }


class CollectClassCounts(Exchange):
    """Setup: the server adds up the clients' class counts."""

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client, {"counts": torch.bincount(data.train.y, minlength=ctx.task.num_classes).float()}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        counts = torch.stack([reply.up["counts"].to(ctx.task.device) for reply in replies.each])
        return server | {"counts": counts.sum(0)}


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    """Mean over the first dimension; counters are the greatest."""
    return torch.tensordot(shares, values, 1) if values.is_floating_point() else values.amax(0)
