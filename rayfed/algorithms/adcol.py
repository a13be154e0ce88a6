"""ADCOL: Li, He and Song 2023, "Adversarial Collaborative Learning on Non-IID Features", Eq. 2 and Alg. 1.

Nothing is averaged: each party keeps its own model F_i = predictor ∘ G_i, batch norm included. What the parties share
is a discriminator D that guesses from a representation z = G_i(x) whose it is.

    client:  F_i ← F_i − η ∇[CE(F_i(x), y) + μ KL(1/N ‖ D(z))],  KL = −log N − (1/N) Σ_j log D_j(z);  D is frozen
             sends z of its training examples: after local training, in evaluation mode, and never augmented
    server:  D ← D − η_D ∇CE(D(z), i) in shuffled minibatches of all that was sent

`sampling` sends a fresh share of the vectors each round. If a round reaches some parties only, D keeps its N outputs
and the target stays 1/N. With `fixed_size` (appendix B.14) D has one output per party of the round, which makes two
trips: the cohort trains without D and sends z, the server trains a new D on their places in the cohort, and the same
parties train again, with the target one over the cohort's size. D's momentum starts at zero in every round.

With `discriminators` = k the divergence is the mean over those received in the last k rounds (Eq. 18), of which there
are fewer at first; parties keep the older ones, so that one travels. `share_predictor` averages the head (appendix B).
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Replies, Setting, State, represent
from rayfed.algorithms.discriminator import ResNetDiscriminator, mlp, train_classifier
from rayfed.algorithms.fedavg import FedAvg
from rayfed.errors import UsageError
from rayfed.network import gradients, weights_of
from rayfed.optim import SGD
from rayfed.options import option
from rayfed.task import Batch, Task
from rayfed.tree import Weights, only, tree_map


def divergence(logits: Tensor) -> Tensor:
    """KL(uniform ‖ softmax(logits)), mean over the batch; its gradient per row is softmax − 1/N."""
    return -math.log(logits.shape[1]) - F.log_softmax(logits, 1).mean()


@dataclass(frozen=True, kw_only=True)
class Adcol(FedAvg):
    """Sends representations, gets a discriminator, which is trained and never averaged; keeps and is scored with its
    own model. The target of sampled parties, initial discriminators and the server's optimiser are ours."""

    name: ClassVar[str] = "adcol"
    source: ClassVar[str] = "Li, He and Song 2023, Alg. 1"
    scored: ClassVar[str] = "downloaded"  # the party's own model

    mu: float = option(1.0, low=0, help="μ, weight of the divergence; 0 is the control: local training alone")
    sampling: float = option(1.0, above=0, high=1, help="share of its representations that a party sends each round")
    fixed_size: bool = option(False, help="a new discriminator each round, with one output per party of the round")
    discriminators: int = option(1, low=1, help="N_d, how many of the last discriminators the divergence is a mean of")
    share_predictor: bool = option(False, help="average the head as FedAvg does; the rest of the model stays")
    network: str = option("mlp", choices=("mlp", "resnet18", "resnet50"), help="kind of the discriminator")
    hidden: list[int] = option([512, 512], low=1, help="widths of the discriminator's hidden layers")
    linear: bool = option(False, help="a discriminator without ReLU (appendix B.15)")
    server_epochs: int | None = option(None, low=1, help="the discriminator's passes a round; null: 1 (fixed_size: 10)")
    server_lr: float = option(0.01, above=0, help="η_D, the discriminator's learning rate")
    server_momentum: float = option(0.9, low=0, below=1, help="the discriminator's momentum")
    server_weight_decay: float = option(1e-5, low=0, help="the discriminator's weight decay")
    server_batch_size: int = option(64, low=1, help="representations in a batch of the discriminator")

    @property
    def trips(self) -> int:
        return 2 if self.fixed_size else 1

    def check(self, setting: Setting) -> None:
        if self.fixed_size and setting.cohort < 2:
            raise UsageError("algorithm.fixed_size=true: needs two parties or more in a round to tell apart, got 1")
        if self.fixed_size and self.discriminators > 1:
            raise UsageError(
                f"algorithm.discriminators={self.discriminators}: with fixed_size=true there is one, new in each round"
            )
        if self.share_predictor and not setting.task.head_names:
            raise UsageError("algorithm.share_predictor=true: the model has no head that could be averaged")

    def personal(self, task: Task) -> frozenset[str]:
        names = frozenset(task.initial_weights())
        return names - (task.head_names - task.personal) if self.share_predictor else names

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": self.discriminator(task, task.num_clients)}

    def discriminator(self, task: Task, outputs: int) -> nn.Module:
        width = math.prod(task.feature_shape)
        if self.network != "mlp":
            return ResNetDiscriminator(self.network, width, outputs)
        return mlp([width, *self.hidden, outputs], linear=self.linear)

    def fresh(self, task: Task, outputs: int) -> Weights:
        """A newly drawn discriminator; linear layers run with weights of any width, so the template serves all."""
        return weights_of(self.discriminator(task, outputs).to(task.device))

    def init(self, ctx: Context) -> State:
        drawn = {} if self.fixed_size else self.fresh(ctx.task, ctx.task.num_clients)
        return super().init(ctx) | {"discriminator": drawn}

    def broadcast(self, ctx: Context, server: State) -> State:
        down = super().broadcast(ctx, server)
        return down if self.fixed_size and ctx.trip == 0 else down | {"discriminator": server["discriminator"]}

    def join(self, ctx: Context) -> State:
        older = self.discriminators - 1
        if not older:
            return super().join(ctx)
        template = weights_of(ctx.task.modules["discriminator"].module)
        stacked = tree_map(lambda leaf: torch.zeros(older, *leaf.shape, dtype=leaf.dtype, device=leaf.device), template)
        rounds = torch.zeros(older, device=ctx.task.device)  # in which they were received
        return super().join(ctx) | {"older": stacked, "rounds": rounds}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if "older" in client:
            used = (client["rounds"] > max(ctx.round - self.discriminators, 0)).float()
            work |= {"older": client["older"], "used": used}
        return work

    def prepared(self, z: Tensor) -> Tensor:
        """Representations [batch, width] as a discriminator is given them, by the server or in the client's loss."""
        return z

    def divergences(self, ctx: Context, work: State, down: State, z: Tensor) -> Tensor:
        """The mean divergence over the discriminators at hand; they are frozen, so in evaluation mode."""

        def of(weights: Weights) -> Tensor:
            return divergence(ctx.task.modules["discriminator"](weights, z, train=False)[0])

        newest = of(down["discriminator"])
        if "older" not in work:
            return newest
        older = [
            work["used"][k] * of(tree_map(lambda leaf, k=k: leaf[k], work["older"])) for k in range(len(work["used"]))
        ]
        return (newest + torch.stack(older).sum()) / (1 + work["used"].sum())

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, dict[str, Tensor]]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            metrics = {"cross_entropy": loss, "representation_variance": z.var(0, unbiased=False).mean()}
            if "discriminator" in down:
                kl = self.divergences(ctx, work, down, self.prepared(z))
                loss, metrics = loss + self.mu * kl, metrics | {"divergence": kl}
            return loss, (output.buffers, metrics)

        grads, loss, (buffers, metrics) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, metrics | {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        if self.fixed_size and ctx.trip == 1:
            return kept, up
        if "older" in client:
            push = {name: torch.cat([new[None], client["older"][name]]) for name, new in down["discriminator"].items()}
            times = torch.cat([torch.full_like(client["rounds"][:1], ctx.round), client["rounds"]])
            kept |= {"older": {name: value[:-1] for name, value in push.items()}, "rounds": times[:-1]}
        more, rows = self.chosen(ctx, client, len(data.train))
        z = represent(ctx, work["weights"], data.train, rows).flatten(1)
        return kept | more, up | {"representations": self.protected(self.prepared(z))}

    def count(self, examples: int) -> int:
        """How many representations a party sends."""
        return math.ceil(self.sampling * examples - 1e-9)  # 0.28·25 is a little more than 7 in floating point

    def chosen(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        """(changes of the client's state, the rows whose representations it sends; None: all of them)."""
        return {}, None if self.sampling == 1 else torch.randperm(examples)[: self.count(examples)]

    def protected(self, z: Tensor) -> Tensor:
        """Representations as they are sent."""
        return z

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        if self.share_predictor:
            server = super().aggregate(ctx, server, replies)
        if self.fixed_size and ctx.trip == 1:
            return server
        sent = [reply.up["representations"] for reply in replies.each]
        labels = [ctx.cohort.index(reply.client) if self.fixed_size else reply.client for reply in replies.each]
        places = torch.tensor(labels).repeat_interleave(torch.tensor([len(z) for z in sent]))
        weights = self.fresh(ctx.task, len(ctx.cohort)) if self.fixed_size else server["discriminator"]
        device = ctx.task.device
        return server | self.taught(ctx, server, weights, torch.cat(sent).to(device), places.to(device))

    @property
    def server_optimizer(self) -> SGD:
        return SGD(lr=self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay)

    @property
    def passes(self) -> int:
        """The discriminator's passes in a round."""
        return self.server_epochs or (10 if self.fixed_size else 1)

    def taught(self, ctx: Context, server: State, weights: Weights, z: Tensor, places: Tensor) -> State:
        """Changes of the server's state: the discriminator `weights` after its training on (z, places)."""
        how: dict[str, Any] = {"batch_size": self.server_batch_size, "epochs": self.passes}
        network = ctx.task.modules["discriminator"]
        trained = train_classifier(network, weights, z, places, optimizer=self.server_optimizer, **how)
        return {"discriminator": trained}
