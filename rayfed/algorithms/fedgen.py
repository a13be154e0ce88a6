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
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Phase, Replies, Setting, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fraug_parts import one_hot
from rayfed.errors import UsageError
from rayfed.network import gradients
from rayfed.optim import Adam
from rayfed.options import option
from rayfed.task import Batch, Output, Task
from rayfed.tree import Weights, clone, only, stack, tree_map, without


class FeatureGenerator(nn.Module):
    """G(y, ε): classes [batch] and noise [batch, noise] to features [batch, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.shape = classes, tuple(shape)
        width = int(torch.Size(self.shape).numel())
        self.layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(hidden, width),
        )

    def forward(self, y: Tensor, noise: Tensor) -> Tensor:
        return self.layers(torch.cat([noise, one_hot(y, self.classes)], 1)).unflatten(1, self.shape)


def drawn_classes(counts: Tensor, size: int) -> Tensor:
    """`size` classes drawn in proportion to `counts` [classes]."""
    edges = (counts.cumsum(0) / counts.sum())[:-1]
    return (torch.rand(size, device=counts.device)[:, None] >= edges).sum(1)


@dataclass(frozen=True, kw_only=True)
class FedGen(FedAvg):
    """Sends its model (the head as a field of its own, since the server needs each) and, once, its class counts; gets
    the model, the generator and the pooled counts. Scored is the server's model."""

    name: ClassVar[str] = "fedgen"
    source: ClassVar[str] = "Zhu, Hong and Zhou 2021, Alg. 1, in PFLlib's form"
    setup_exchanges: ClassVar[int] = 1  # type: ignore[assignment]

    noise: int = option(512, low=1, help="d, width of the generator's noise")
    hidden: int = option(512, low=1, help="width of the generator's hidden layer")
    server_lr: float = option(0.005, above=0, help="lr_G, learning rate of the generator's Adam")
    server_steps: int = option(1000, low=1, help="steps of the generator in a round, on batches of local.batch_size")

    def check(self, setting: Setting) -> None:
        if not self.head(setting.task):
            raise UsageError(f"algorithm.name={self.name}: the model needs a split point with weights in its head")
        if setting.batch_size == 1:
            raise UsageError("local.batch_size=1: algorithm.name=fedgen cannot train its batch norm on one example")

    def head(self, task: Task) -> frozenset[str]:
        """Names of the head's weights that travel."""
        return task.head_names - self.personal(task)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if not task.feature_shape:
            return {}  # refused in `check`
        return {"generator": FeatureGenerator(self.noise, self.hidden, task.num_classes, task.feature_shape)}

    def generated(self, ctx: Context, generator: Weights, counts: Tensor) -> tuple[Tensor, Tensor]:
        """(ŷ, features)."""
        y = drawn_classes(counts, ctx.batch_size)
        noise = torch.rand(len(y), self.noise, device=y.device)
        return y, ctx.task.modules["generator"](generator, y, noise)[0]

    def as_sent(self, task: Task) -> Weights:
        """Initial values of what the head does not send."""
        return only(task.initial_weights(), task.head_names & self.personal(task))

    def init(self, ctx: Context) -> State:
        classes, generator = ctx.task.num_classes, ctx.task.modules["generator"].initial()
        return super().init(ctx) | {
            "generator": generator,
            "moments": Adam(lr=self.server_lr).init(generator),
            "counts": torch.zeros(classes, device=ctx.task.device),
            "rounds": torch.zeros((), dtype=torch.long, device=ctx.task.device),  # that the generator was trained in
        }

    def broadcast(self, ctx: Context, server: State) -> State:
        if ctx.stage == "setup":
            return {}
        down = super().broadcast(ctx, server)
        return down | only(server, ("generator", "counts")) if int(server["rounds"]) else down

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return () if ctx.stage == "setup" else super().phases(ctx)

    def start(self, ctx: Context, client: State, down: State) -> State:
        return {} if ctx.stage == "setup" else super().start(ctx, client, down)

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        value, output = super().loss(ctx, weights, work, down, batch)
        if "generator" not in down:
            return value, output
        with torch.no_grad():
            y, features = self.generated(ctx, down["generator"], down["counts"])
        return value + ctx.task.loss(ctx.task.head(weights | self.as_sent(ctx.task), features), y), output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        if ctx.stage == "setup":
            return client, {"counts": torch.bincount(data.train.y, minlength=ctx.task.num_classes).float()}
        kept, up = super().finish(ctx, work, client, down, data)
        names = self.head(ctx.task)
        return kept, {"weights": without(up["weights"], names), "head": only(up["weights"], names)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        device = ctx.task.device
        if ctx.stage == "setup":
            return server | {"counts": torch.stack([reply.up["counts"].to(device) for reply in replies.each]).sum(0)}
        heads = stack([tree_map(lambda leaf: leaf.to(device), reply.up["head"]) for reply in replies.each])
        shares = torch.tensor([float(self.weight(ctx, reply.examples)) for reply in replies.each], device=device)
        shares = shares / shares.sum()
        found = replies.mean["weights"] | {name: _mean(value, shares) for name, value in heads.items()}
        generator, moments = self.train_generator(ctx, server, heads, shares)
        return server | {
            "weights": {name: found[name] for name in server["weights"]},
            "generator": generator,
            "moments": moments,
            "rounds": server["rounds"] + 1,
        }

    def train_generator(self, ctx: Context, server: State, heads: Weights, shares: Tensor) -> tuple[Weights, State]:
        generator, moments = clone(server["generator"]), clone(server["moments"])
        adam, rest = Adam(lr=self.server_lr), self.as_sent(ctx.task)
        body = without(ctx.task.initial_weights(), ctx.task.head_names)  # the template wants all names

        def logits(head: Weights, features: Tensor) -> Tensor:
            return ctx.task.head(body | rest | head, features, train=False)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            y, features = self.generated(ctx, trained, server["counts"])
            each = torch.vmap(logits, in_dims=(0, None))(heads, features)
            return F.cross_entropy(torch.tensordot(shares, each, 1), y), {}

        for _ in range(self.server_steps):
            grads, _, _ = gradients(objective, generator)
            adam.update_(generator, grads, moments)
        return generator, moments


def _mean(values: Tensor, shares: Tensor) -> Tensor:
    """Mean over the first dimension; counters are the greatest."""
    return torch.tensordot(shares, values, 1) if values.is_floating_point() else values.amax(0)
