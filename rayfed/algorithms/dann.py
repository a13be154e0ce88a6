"""DANN: Ganin et al. 2016, "Domain-Adversarial Training of Neural Networks", Eq. 8 to 10, between clients, as in
FedDebias, appendix A.

A discriminator D predicts a client from its features φ(x); clients learn features that D cannot tell apart.

    client, each step:  D ← D − η ∇CE(D(φ(x)), i),  then
                        (φ, ω) ← (φ, ω) − η ∇[CE(ω(φ(x)), y) − a CE(D(φ(x)), i)]
    server:             means of φ, ω, D, weighted by n_i

Both steps use every batch; released code alternates them, which halves the classifier's steps. A client sees one label
i only, so that its own D soon predicts nothing else: D tells clients apart only through averaging. D is trained by the
model's optimiser.
"""

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Finished, Replies, State, Stepped
from rayfed.algorithms.common.networks import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class DANN(FedAvg):
    name = "dann"
    reference = "Ganin et al. 2016, Eq. 8 to 10; Guo, Tang and Lin 2022, appendix A"
    traits = replace(
        FedAvg.traits,
        needs_split=True,
        refuses_unseen_clients="has a discriminator with no output for a client that did not train",
    )
    averaged = ("weights", "discriminator")

    weight_adversary: float = option(0.1, low=0, help="a, weight of the discriminator's loss; 0: FedAvg")
    hidden: list[int] = option([256, 256], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def modules(self, task: Task) -> dict[str, nn.Module]:
        width = math.prod(task.feature_shape)
        return {"discriminator": mlp([width, *self.hidden, task.num_clients])}

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["discriminator"] = ctx.task.modules["discriminator"].draw_weights()
        return server

    def broadcast(self, ctx: Context, server: State) -> State:
        return only(server, self.averaged)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        discriminator = down["discriminator"]
        fresh = ctx.optimizer.init(discriminator)
        work["discriminator"] = discriminator
        work["discriminator_optimizer"] = client.get("discriminator_optimizer", fresh)
        work["client_label"] = torch.tensor(ctx.client, device=ctx.task.device)
        return work

    def discriminator_loss(self, ctx: Context, weights: Weights, features: Tensor, label: Tensor) -> Tensor:
        """Return CE(D(φ(x)), i)."""
        discriminator = ctx.task.modules["discriminator"]
        logits, _ = discriminator(weights, features.flatten(1))
        labels = label.expand(len(logits))
        return F.cross_entropy(logits, labels)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        with torch.no_grad():
            features = ctx.task.forward(work["weights"], batch.x).features
        label = work["client_label"]

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            return self.discriminator_loss(ctx, trained, features, label), {}

        discriminator = work["discriminator"]
        grads, discriminator_loss, _ = gradients(objective, discriminator)
        ctx.optimizer.update_(discriminator, grads, work["discriminator_optimizer"])
        work, metrics = super().step(ctx, work, down, batch)
        return work, metrics | {"discriminator_loss": discriminator_loss}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        adversary = self.discriminator_loss(ctx, work["discriminator"], output.features, work["client_label"])
        return loss - self.weight_adversary * adversary, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        if ctx.keep_optimizer:
            client["discriminator_optimizer"] = work["discriminator_optimizer"]
        up["discriminator"] = work["discriminator"]
        return client, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | only(replies.mean, self.averaged)
