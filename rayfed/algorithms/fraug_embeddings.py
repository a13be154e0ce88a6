"""FRAug's synthetic embeddings: noise to the generator's, and on to the client's own; see `rayfed.algorithms.fraug`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayfed.algorithm import Context, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fraug_parts import Generator, RTNet
from rayfed.options import option
from rayfed.task import Task

Pairs = list[tuple[Tensor, Tensor]]
"""Real embeddings [batch, width] that augmentation starts from, and their classes [batch]."""


@dataclass(frozen=True, kw_only=True)
class Embeddings(FedAvg):
    use_generator: bool = option(True, help="the shared generator; without it, noise goes into the RTNets")
    use_rtnet: bool = option(True, help="the clients' own networks; without them, the generator's output is mixed in")
    embeddings: str = option("both", choices=("u", "uc", "both"), help="what is augmented: batch, prototypes, or both")
    interpolate: bool = option(True, help="let the augmentation grow, λ = exp(γ(r−R)); without it, λ = 1")
    gamma: float = option(0.01, low=0, help="γ of λ; it counts in rounds, so fit it to their number (the paper's: 200)")
    latent: int = option(256, low=1, help="width of the noise and of the RTNets' hidden layer")
    noise: str = option("normal", choices=("normal", "uniform"), help="distribution of the noise: N(0, I) or U[0, 1)")
    conditional: bool = option(True, help="tell the generator and the RTNets the class")

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if len(task.feature_shape) != 1:
            return {}  # refused in `check`
        (width,), classes = task.feature_shape, task.num_classes if self.conditional else 0
        made: dict[str, nn.Module] = {}
        if self.use_generator:
            made["generator"] = Generator(self.latent, width, classes)
        if self.use_rtnet:
            made["rtnet"] = RTNet(self.latent, width, classes)
        return made

    def strength(self, ctx: Context) -> float:
        """λ_syn of the round."""
        return math.exp(self.gamma * (ctx.round - 1 - ctx.rounds)) if self.interpolate else 1.0

    def pairs(self, u: Tensor, y: Tensor, prototypes: Tensor, classes: Tensor) -> Pairs:
        both = {"u": (u, y), "uc": (prototypes[classes], classes)}
        return [pair for name, pair in both.items() if self.embeddings in (name, "both")]

    def drawn(self, ctx: Context, count: int, width: int) -> Tensor:
        if self.noise == "uniform":
            return torch.rand(count, width, device=ctx.task.device)
        return torch.randn(count, width, device=ctx.task.device)

    def generated(self, ctx: Context, work: State, y: Tensor) -> Tensor:
        """v of new noise, by the generator in evaluation mode."""
        if not self.use_generator:
            return self.drawn(ctx, len(y), *ctx.task.feature_shape)
        return ctx.task.modules["generator"](work["generator"], self.drawn(ctx, len(y), self.latent), y, train=False)[0]

    def augmented(self, ctx: Context, work: State, anchors: Tensor, y: Tensor) -> Tensor:
        """û as the classifier gets to see it: what another augmentation replaces."""
        v, strength = self.generated(ctx, work, y), self.strength(ctx)
        if not self.use_rtnet:
            return (1 - strength) * anchors + strength * v
        return anchors + strength * ctx.task.modules["rtnet"](work["rtnet"], v, y, train=False)[0]
