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
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Replies, Setting, State, represent
from rayfed.algorithms.discriminator import mlp, train_classifier
from rayfed.algorithms.fedavg import FedAvg
from rayfed.errors import UsageError
from rayfed.network import gradients, weights_of
from rayfed.optim import SGD
from rayfed.options import option
from rayfed.task import Batch, Task
from rayfed.tree import Weights, only


def divergence(logits: Tensor) -> Tensor:
    """KL(uniform ‖ softmax(logits)), mean over the batch; its gradient per row is softmax − 1/N."""
    return -math.log(logits.shape[1]) - F.log_softmax(logits, 1).mean()


@dataclass(frozen=True, kw_only=True)
class Adcol(FedAvg):
    name: ClassVar[str] = "adcol"
    source: ClassVar[str] = "Li, He and Song 2023, Alg. 1"
    scored: ClassVar[str] = "downloaded"  # the party's own model

    mu: float = option(1.0, low=0, help="μ, weight of the divergence; 0 is the control: local training alone")
    sampling: float = option(1.0, above=0, high=1, help="share of its representations that a party sends each round")
    fixed_size: bool = option(False, help="a new discriminator each round, with one output per party of the round")
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

    def personal(self, task: Task) -> frozenset[str]:
        return frozenset(task.initial_weights())

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": self.discriminator(task, task.num_clients)}

    def discriminator(self, task: Task, outputs: int) -> nn.Module:
        return mlp([math.prod(task.feature_shape), *self.hidden, outputs], linear=self.linear)

    def fresh(self, task: Task, outputs: int) -> Weights:
        """A newly drawn discriminator; linear layers run with weights of any width, so the template serves all."""
        return weights_of(self.discriminator(task, outputs).to(task.device))

    def init(self, ctx: Context) -> State:
        drawn = {} if self.fixed_size else self.fresh(ctx.task, ctx.task.num_clients)
        return super().init(ctx) | {"discriminator": drawn}

    def broadcast(self, ctx: Context, server: State) -> State:
        down = super().broadcast(ctx, server)
        return down if self.fixed_size and ctx.trip == 0 else down | {"discriminator": server["discriminator"]}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, dict[str, Tensor]]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            metrics = {"cross_entropy": loss, "representation_variance": z.var(0, unbiased=False).mean()}
            if "discriminator" in down:
                kl = divergence(ctx.task.modules["discriminator"](down["discriminator"], z)[0])
                loss, metrics = loss + self.mu * kl, metrics | {"divergence": kl}
            return loss, (output.buffers, metrics)

        grads, loss, (buffers, metrics) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, metrics | {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        if self.fixed_size and ctx.trip == 1:
            return kept, up
        count = math.ceil(self.sampling * len(data.train) - 1e-9)  # 0.28·25 is a little more than 7 in floating point
        rows = None if self.sampling == 1 else torch.randperm(len(data.train))[:count]
        return kept, up | {"representations": represent(ctx, work["weights"], data.train, rows).flatten(1)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        if self.fixed_size and ctx.trip == 1:
            return server
        sent = [reply.up["representations"] for reply in replies.each]
        labels = [ctx.cohort.index(reply.client) if self.fixed_size else reply.client for reply in replies.each]
        places = torch.tensor(labels).repeat_interleave(torch.tensor([len(z) for z in sent]))
        trained = train_classifier(
            ctx.task.modules["discriminator"],
            self.fresh(ctx.task, len(ctx.cohort)) if self.fixed_size else server["discriminator"],
            torch.cat(sent).to(ctx.task.device),
            places.to(ctx.task.device),
            optimizer=SGD(lr=self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay),
            batch_size=self.server_batch_size,
            epochs=self.server_epochs or (10 if self.fixed_size else 1),
        )
        return server | {"discriminator": trained}
