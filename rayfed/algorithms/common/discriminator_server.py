"""ADCOL's server: it draws a discriminator, trains it on the representations that were sent, and sends it out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.discriminator import ResNetDiscriminator, judge, train_classifier
from rayfed.algorithms.common.mlp import mlp
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import Weights, without


@dataclass(frozen=True, kw_only=True)
class DiscriminatorServer(FedAvg):
    logged_scalars: ClassVar[tuple[str, ...]] = ("discriminator_loss", "discriminator_accuracy")

    fixed_size: bool = option(False, help="a new discriminator each round, with one output per party of the round")
    share_predictor: bool = option(False, help="average the head as FedAvg does; the rest of the model stays")
    network: str = option("mlp", choices=("mlp", "resnet18", "resnet50"), help="kind of the discriminator")
    hidden: list[int] = option([512, 512], low=1, high=65536, help="widths of the discriminator's hidden layers")
    linear: bool = option(False, help="a discriminator without ReLU (appendix B.15)")
    server_epochs: int | None = option(None, low=1, help="the discriminator's passes a round; null: 1 (fixed_size: 10)")
    server_lr: float = option(0.01, above=0, help="η_D, the discriminator's learning rate")
    server_momentum: float = option(0.9, low=0, below=1, help="the discriminator's momentum")
    server_weight_decay: float = option(1e-5, low=0, help="the discriminator's weight decay")
    server_batch_size: int = option(64, low=1, help="representations in a batch of the discriminator")

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return (WithoutDiscriminator(self), WithDiscriminator(self)) if self.fixed_size else (self,)

    @property
    def server_optimizer(self) -> SGD:
        return SGD(lr=self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay)

    @property
    def passes(self) -> int:
        """The discriminator's passes in a round."""
        return self.server_epochs or (10 if self.fixed_size else 1)

    def check(self, problem: ProblemSpec) -> None:
        if self.fixed_size and problem.cohort < 2:
            raise UsageError("algorithm.fixed_size=true: needs two parties or more in a round to tell apart, got 1")
        if self.share_predictor and not problem.task.head_names:
            raise UsageError("algorithm.share_predictor=true: the model has no head that could be averaged")

    def personal(self, task: Task) -> frozenset[str]:
        names = frozenset(task.initial_weights())
        return names - (task.head_names - task.personal_names) if self.share_predictor else names

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
        return super().broadcast(ctx, server) | {"discriminator": server["discriminator"]}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = self.average(ctx, server, replies)
        known, kept = self.known(ctx, server, replies)
        z, sizes = torch.cat(list(known.values())), torch.tensor([len(some) for some in known.values()])
        places = torch.tensor(list(known)).repeat_interleave(sizes).to(z.device)
        weights = self.fresh(ctx.task, len(ctx.cohort)) if self.fixed_size else server["discriminator"]
        taught = self.taught(ctx, server, weights, z, places)
        scores = judge(ctx.task.modules["discriminator"], taught["discriminator"], z, places)
        return server | kept | taught | dict(zip(self.logged_scalars, scores, strict=True))

    def average(self, ctx: Context, server: State, replies: Replies) -> State:
        """Average what is shared of the model, with `share_predictor` the head."""
        return super().aggregate(ctx, server, replies) if self.share_predictor else server

    def known(self, ctx: Context, server: State, replies: Replies) -> tuple[dict[int, Tensor], State]:
        """(the representations to learn from, by the output that stands for their party; changes of the state)."""
        place = {client: k if self.fixed_size else client for k, client in enumerate(ctx.cohort)}
        return {place[r.client]: r.up["representations"].to(ctx.task.device) for r in replies.each}, {}

    def taught(self, ctx: Context, server: State, weights: Weights, z: Tensor, places: Tensor) -> State:
        """Changes of the server's state: the discriminator `weights` after its training on (z, places)."""
        how: dict[str, Any] = {"batch_size": self.server_batch_size, "epochs": self.passes}
        network = ctx.task.modules["discriminator"]
        trained = train_classifier(network, weights, z, places, optimizer=self.server_optimizer, **how)
        return {"discriminator": trained}

    def keep(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        """`finish` without representations."""
        return FedAvg.finish(self, ctx, work, client, down, data)


@dataclass(frozen=True)
class WithoutDiscriminator(Delegate):
    """With `fixed_size`, the first exchange: the cohort trains without a discriminator and sends representations."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return without(self.base.broadcast(ctx, server), ("discriminator",))


@dataclass(frozen=True)
class WithDiscriminator(Delegate):
    """With `fixed_size`, the second exchange: the cohort trains with the new discriminator and sends none."""

    base: DiscriminatorServer

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return self.base.keep(ctx, work, client, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return self.base.average(ctx, server, replies)
