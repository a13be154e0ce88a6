"""FADA's server: a binary discriminator D_s for every pair of a source s and the target."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.common.discriminator import train_classifier
from rayfed.algorithms.common.mlp import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import Weights, only, stack, sub, tree_map, unstack

SOURCE, TARGET = 1, 0


@dataclass(frozen=True, kw_only=True)
class DomainPairs(FedAvg):
    target: int = option(0, low=0, help="number of the client that has no labels, and for which the model is")
    hidden: list[int] = option([512, 512], low=1, high=65536, help="widths of the discriminators' hidden layers")
    server_epochs: int = option(1, low=1, help="the discriminators' passes in a round")
    server_lr: float = option(0.01, above=0, help="η_D, learning rate of the discriminators' SGD")
    server_momentum: float = option(0.9, low=0, below=1, help="its momentum")
    server_batch_size: int = option(64, low=1, help="representations in a batch of a discriminator")

    def sources(self, ctx: Context) -> list[int]:
        return [i for i in range(ctx.task.num_clients) if i != self.target]

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"discriminator": mlp([math.prod(task.feature_shape), *self.hidden, 2])}

    def drawn(self, ctx: Context) -> Weights:
        """New discriminators [sources, …]."""
        return stack([ctx.task.modules["discriminator"].draw_weights() for _ in self.sources(ctx)])

    def taught(self, ctx: Context, server: State, z: dict[int, Tensor]) -> Weights:
        """The discriminators after a round's passes over the representations z [n, width] of source and target."""
        network, trained = ctx.task.modules["discriminator"], []
        optimizer = SGD(lr=self.server_lr, momentum=self.server_momentum)
        pairs = unstack(server["discriminators"], len(self.sources(ctx)))
        for source, weights in zip(self.sources(ctx), pairs, strict=True):
            x = torch.cat([z[source], z[self.target]])
            y = torch.tensor([SOURCE] * len(z[source]) + [TARGET] * len(z[self.target]), device=x.device)
            how = {"batch_size": self.server_batch_size, "epochs": self.server_epochs}
            trained.append(train_classifier(network, weights, x, y, optimizer=optimizer, **how))
        return stack(trained)

    def gathered(self, ctx: Context, server: State, replies: Replies) -> State:
        """The state between the trips: the sources' `models` [sources, …], how the target `moved` all but the head."""
        sent = {int(reply.client): tree_map(lambda leaf: leaf.to(ctx.task.device), reply.up) for reply in replies.each}
        names = only(server["weights"], set(ctx.task.trainable) - ctx.task.head_names)
        return server | {
            "models": stack([sent[source]["weights"] for source in self.sources(ctx)]),
            "moved": sub(only(sent[self.target]["weights"], names), names),
            "discriminators": self.taught(ctx, server, {int(i): up["representations"] for i, up in sent.items()}),
        }
