"""FRAug's local step, its three stages one after the other; see `rayfed.algorithms.fraug` for the formulas."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.algorithms.common.fraug_embeddings import Embeddings, Pairs
from rayfed.algorithms.common.fraug_networks import cycled, entropy
from rayfed.algorithms.common.mmd import mmd
from rayfed.algorithms.common.prototypes import moved, one_hot
from rayfed.core.network import gradients
from rayfed.core.optim import SGD
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class Stages(Embeddings):
    lambda_c: float = option(0.3, above=0, high=1, help="λ_c, rate at which prototypes follow the batches")
    alpha: float = option(1.0, low=0, help="α, weight of the distance that the generator maximises")
    beta: float = option(1.0, low=0, help="β, weight of the distance that the RTNets minimise")
    distance_g: str = option("mmd", choices=("mmd", "prototype_mse"), help="D of the generator's loss")
    distance_rt: str = option("mmd", choices=("mmd", "mse"), help="D of the RTNets' loss")
    lr_g: float = option(0.05, above=0, help="learning rate of the generator's SGD")
    lr_m: float = option(0.05, above=0, help="learning rate of the RTNets' SGD")
    momentum: float = option(0.5, low=0, below=1, help="momentum of the generator's and the RTNets' SGD")

    def sgd(self, part: str) -> SGD:
        return SGD(lr=self.lr_g if part == "generator" else self.lr_m, momentum=self.momentum)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        present = one_hot(batch.y, ctx.task.num_classes).sum(0) > 0
        seen = work["seen"] | present
        classes = cycled(seen, work["position"], len(batch.y))
        work, metrics = self.train_classifier(ctx, work, down, batch, classes)
        work = work | {"seen": seen, "position": work["position"] + len(batch.y)}
        u = ctx.task.represent(work["weights"], batch.x)
        if self.generates:
            work, more = self.train_generator(ctx, work, u, classes)
            metrics |= more
        if self.transforms:
            pairs = self.pairs(u, batch.y, work["prototypes"], classes)
            work, more = self.train_rtnet(ctx, work, pairs)
            metrics |= more
        return work, metrics

    def train_classifier(
        self, ctx: Context, work: State, down: State, batch: Batch, classes: Tensor
    ) -> tuple[State, dict[str, Tensor]]:
        share = min(0.5, self.strength(ctx))  # κ

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            weights = work["weights"] | trained
            real, output = self.loss(ctx, weights, work, down, batch)
            u = output.features.detach()  # the synthetic terms reach the head alone
            prototypes = moved(work["prototypes"], work["seen"], u, batch.y, self.lambda_c)
            synthetic = [
                ctx.task.loss(ctx.task.head(weights, self.augmented(ctx, work, anchors, y)), y)
                for anchors, y in self.pairs(u, batch.y, prototypes, classes)
            ]
            mixed = (1 - share) * real + share * torch.stack(synthetic).mean()
            return mixed, (output.buffers, prototypes)

        weights = work["weights"]
        grads, loss, (buffers, prototypes) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers, "prototypes": prototypes}, {"loss": loss}

    def train_generator(self, ctx: Context, work: State, u: Tensor, classes: Tensor) -> tuple[State, dict[str, Tensor]]:
        network, weights, z = ctx.task.modules["generator"], work["generator"], self.drawn(ctx, len(u), self.latent)

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor]]:
            v, buffers = network(weights | trained, z, classes)
            fit = ctx.task.loss(ctx.task.head(work["weights"], v, train=False), classes)
            far = mmd(v, u) if self.distance_g == "mmd" else F.mse_loss(v, work["prototypes"][classes])
            return fit - self.alpha * far, (buffers, v.norm(dim=1).mean())

        grads, loss, (buffers, norm) = gradients(objective, only(weights, network.parameters))
        self.sgd("generator").update_(weights, grads, work["optimizer_generator"])
        return work | {"generator": weights | buffers}, {"generator_loss": loss, "generated_norm": norm}

    def train_rtnet(self, ctx: Context, work: State, pairs: Pairs) -> tuple[State, dict[str, Tensor]]:
        network, weights = ctx.task.modules["rtnet"], work["rtnet"]
        inputs = [self.generated(ctx, work, y) for _, y in pairs]

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            phi = weights | trained
            buffers: Weights = {}
            losses = []
            for (anchors, y), v in zip(pairs, inputs, strict=True):
                residual, buffers = network(phi | buffers, v, y)
                made = anchors + residual
                away = mmd(made, anchors) if self.distance_rt == "mmd" else F.mse_loss(made, anchors)
                losses.append(self.beta * away - entropy(ctx.task.head(work["weights"], made, train=False)))
            return torch.stack(losses).mean(), buffers

        grads, loss, buffers = gradients(objective, only(weights, network.parameters))
        self.sgd("rtnet").update_(weights, grads, work["optimizer_rtnet"])
        return work | {"rtnet": weights | buffers}, {"rtnet_loss": loss}
