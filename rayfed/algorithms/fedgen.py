"""FedGen: Zhu, Hong and Zhou 2021, "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", Alg. 1. The
form is that of PFLlib, the code of DBE's authors. It omits the original's divergence and diversity terms.

    setup:   every client sends the number of its training examples of each class
    client:  θ_i ← θ_i − η ∇[CE(x, y) + CE(h_i(G(ŷ, ε)), ŷ)],  ŷ drawn from the pooled counts, ε ~ U[0, 1)^noise
    server:  θ = Σ p_i θ_i;  G ← Adam steps on CE(Σ p_i h_i(G(ŷ, ε)), ŷ),  with the heads h_i that clients sent

Clients receive G from round 2 on, when it has been trained. Its batch norm uses the statistics of the current batch, on
the server and on clients. The state of its Adam is kept from round to round. Some parts of a head are never sent (DBE's
bias, a local batch norm). They have their initial values where generated features pass through them, since the server
has no others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Exchange, Finished, ProblemSpec, Replies, State
from rayfed.algorithms.common.networks import ConditionalNetwork
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.personal_heads import refuse_without
from rayfed.core.network import gradients
from rayfed.core.optim import Adam
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, clone, mean_of, only, stack, tree_map, without


@dataclass(frozen=True, kw_only=True)
class FedGen(FedAvg):
    """The head is sent as a separate field, since the server needs each of them."""

    name = "fedgen"
    reference = "Zhu, Hong and Zhou 2021, Alg. 1, in PFLlib's form"
    traits = replace(
        FedAvg.traits,
        needs_split=True,
        assumes_uniform_sampling=True,  # `aggregate` weighs the heads, over the cohort alone
        requires_classes=True,
        logged_scalars=("generator_loss",),
        trains_server=True,
    )

    noise: int = option(
        512,
        low=1,
        high=65536,
        help="d, width of the generator's noise",
        elsewhere={"authors": "16 to 64, by dataset", "PFLlib": "512"},
    )
    hidden: int = option(
        512,
        low=1,
        high=65536,
        help="width of the generator's hidden layer",
        elsewhere={"authors": "64 to 512, by dataset", "PFLlib": "512"},
    )
    server_lr: float = option(
        0.005,
        above=0,
        help="lr_G, the generator's learning rate (Adam)",
        elsewhere={"authors": "0.0001 or 0.0003, by dataset", "PFLlib": "0.005"},
    )
    server_steps: int = option(
        1000,
        low=1,
        help="the generator's steps per round, on batches of local.batch_size",
        elsewhere={"PFLlib": "1000"},
    )

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name, ["head"])

    def head(self, task: Task) -> frozenset[str]:
        """Return the names of the head's weights that clients send."""
        return task.head_names - self.personal(task)

    def unsent_head(self, task: Task) -> Weights:
        """Return the initial values of the head's weights that clients do not send."""
        return only(task.initial_weights(), task.head_names & self.personal(task))

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if not task.feature_shape:
            return {}  # `check` refuses it
        generator = FeatureGenerator(self.noise, self.hidden, task.num_classes, task.feature_shape)
        return {"generator": generator}

    def init(self, ctx: Context) -> State:
        generator = ctx.task.modules["generator"].draw_weights()
        server = super().init(ctx)
        server["generator"] = generator
        server["moments"] = Adam(lr=self.server_lr).init(generator)
        device = ctx.task.device
        server["counts"] = torch.zeros(ctx.task.num_classes, device=device)
        server["rounds"] = torch.zeros((), dtype=torch.long, device=device)  # in which G was trained
        return server

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (CollectClassCounts(),)

    def broadcast(self, ctx: Context, server: State) -> State:
        down = super().broadcast(ctx, server)
        if int(server["rounds"]):
            down |= only(server, ("generator", "counts"))
        return down

    def generate(self, ctx: Context, generator: Weights, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return a random batch of classes ŷ [batch] and features G(ŷ, ε) [batch, ...], drawn where `counts` are."""
        y = draw_classes(counts, ctx.batch_size)
        noise = torch.rand(len(y), self.noise, device=y.device)
        device = ctx.task.device
        y = y.to(device)
        noise = noise.to(device)
        network = ctx.task.modules["generator"]
        features, _ = network(generator, noise, y)
        return y, features

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        if "generator" not in down:
            return loss, output
        with torch.no_grad():
            y, features = self.generate(ctx, down["generator"], down["counts"])
        whole = weights | self.unsent_head(ctx.task)
        logits = ctx.task.head(whole, features)
        return loss + ctx.task.loss(logits, y, weights), output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        weights = up["weights"]
        head = self.head(ctx.task)
        return kept, {"weights": without(weights, head), "head": only(weights, head)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        sent = [reply.up["head"] for reply in replies.each]
        device = ctx.task.device
        heads = tree_map(lambda leaf: leaf.to(device), stack(sent))
        n = [float(self.weight(ctx, reply.examples)) for reply in replies.each]
        shares = torch.tensor(n, device=device)
        shares = shares / shares.sum()
        weights = server["weights"] | replies.mean["weights"]
        for name, values in heads.items():
            weights[name] = mean_of(values, shares)
        generator, moments, loss = self.train_generator(ctx, server, heads, shares)
        return server | {
            "weights": weights,
            "generator": generator,
            "moments": moments,
            "generator_loss": loss,
            "rounds": server["rounds"] + 1,
        }

    def train_generator(
        self, ctx: Context, server: State, heads: Weights, shares: Tensor
    ) -> tuple[Weights, State, Tensor]:
        """Return the generator after a round's Adam steps, its Adam's state, and the mean loss.

        `heads` are the heads that clients sent, stacked: [clients, ...]; `shares` are the p_i [clients].
        """
        unsent = self.unsent_head(ctx.task)
        body = without(ctx.task.initial_weights(), ctx.task.head_names)  # the network expects all names
        counts = server["counts"].cpu()  # so that draws do not depend on where the server is

        def logits(head: Weights, features: Tensor) -> Tensor:
            return ctx.task.head(body | unsent | head, features, train=False)

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            y, features = self.generate(ctx, trained, counts)
            of_clients = torch.vmap(logits, in_dims=(0, None))(heads, features)
            ensemble = torch.tensordot(shares, of_clients.float(), 1)
            return F.cross_entropy(ensemble, y), {}

        generator = clone(server["generator"])
        moments = clone(server["moments"])
        adam = Adam(lr=ctx.scaled(self.server_lr))
        total = torch.zeros((), device=ctx.task.device)
        for _ in range(self.server_steps):
            grads, loss, _ = gradients(objective, generator)
            adam.update_(generator, grads, moments)
            total += loss
        return generator, moments, total / self.server_steps


class CollectClassCounts(Exchange):
    """Setup: the server adds up the clients' class counts."""

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        counts = torch.bincount(data.train.y, minlength=ctx.task.num_classes)
        return client, {"counts": counts.float()}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        counts = torch.stack([reply.up["counts"] for reply in replies.each])
        counts = counts.to(ctx.task.device)
        return server | {"counts": counts.sum(0)}


# The generator


class FeatureGenerator(ConditionalNetwork):
    """G(y, ε), which maps noise [batch, noise] and classes [batch] to features [batch, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        layers = nn.Sequential(
            nn.Linear(noise + classes, hidden),
            nn.BatchNorm1d(hidden, track_running_stats=False),
            nn.ReLU(),
            nn.Linear(hidden, math.prod(shape)),
            nn.Unflatten(1, tuple(shape)),
        )
        super().__init__(classes, layers)


def draw_classes(counts: Tensor, size: int) -> Tensor:
    """Draw `size` classes with probabilities proportional to `counts` [classes]."""
    # CUDA has no deterministic `cumsum` of floats
    edges = counts.long().cumsum(0) / counts.sum()
    drawn = torch.rand(size, device=counts.device)
    return (drawn[:, None] >= edges[:-1]).sum(1)
