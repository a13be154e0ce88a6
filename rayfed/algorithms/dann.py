"""DANN: Ganin et al. 2016, "Domain-Adversarial Training of Neural Networks", Eq. 8 to 10, between clients, as in
FedDebias, appendix A.

A discriminator D predicts from features φ(x) whose they are; clients learn features that D cannot tell apart.

    client, each step:  D ← D − η ∇CE(D(φ(x)), i),  then
                        (φ, ω) ← (φ, ω) − η ∇[CE(ω(φ(x)), y) − a CE(D(φ(x)), i)]
    server:             means of φ, ω, D, weighted by n_i

Both steps use every batch; released code alternates them, which halves the classifier's steps. A client sees one label
i only, so that its own D soon predicts nothing else: D tells clients apart only through averaging. D is trained by the
model's optimiser.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Replies, State, Traits
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class DANN(FedAvg):
    name: ClassVar[str] = "dann"
    reference: ClassVar[str] = "Ganin et al. 2016, Eq. 8 to 10; Guo, Tang and Lin 2022, appendix A"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits,
        needs_split=True,
        refuses_unseen_clients="has a discriminator with no output for a client that did not train",
    )
    averaged: ClassVar[tuple[str, ...]] = ("weights", "discriminator")

    weight_adversary: float = option(0.1, low=0, help="a, weight of the discriminator's loss; 0: FedAvg")
    hidden: list[int] = option([256, 256], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": mlp([math.prod(task.feature_shape), *self.hidden, task.num_clients])}

    def init(self, ctx: Context) -> State:
        return super().init(ctx) | {"discriminator": ctx.task.modules["discriminator"].draw_weights()}

    def broadcast(self, ctx: Context, server: State) -> State:
        return only(server, self.averaged)

    def start(self, ctx: Context, client: State, down: State) -> State:
        initial_moments = ctx.optimizer.init(down["discriminator"])
        return super().start(ctx, client, down) | {
            "discriminator": down["discriminator"],
            "discriminator_optimizer": client.get("discriminator_optimizer", initial_moments),
            "client_label": torch.tensor(ctx.client, device=ctx.task.device),
        }

    def discriminator_loss(self, ctx: Context, weights: Weights, features: Tensor, label: Tensor) -> Tensor:
        """Return CE(D(φ(x)), i)."""
        logits = ctx.task.modules["discriminator"](weights, features.flatten(1))[0]
        return F.cross_entropy(logits, label.expand(len(logits)))

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        with torch.no_grad():
            features = ctx.task.forward(work["weights"], batch.x).features

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            return self.discriminator_loss(ctx, trained, features, work["client_label"]), {}

        grads, discriminator_loss, _ = gradients(objective, work["discriminator"])
        ctx.optimizer.update_(work["discriminator"], grads, work["discriminator_optimizer"])
        work, metrics = super().step(ctx, work, down, batch)
        return work, metrics | {"discriminator_loss": discriminator_loss}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        adversary = self.discriminator_loss(ctx, work["discriminator"], output.features, work["client_label"])
        return loss - self.weight_adversary * adversary, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        moments = only(work, ("discriminator_optimizer",)) if ctx.keep_optimizer else {}
        return client | moments, up | only(work, ("discriminator",))

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | only(replies.mean, self.averaged)
