"""FRAug's synthetic embeddings: noise to the generator's, and on to the client's own; see `rayfed.algorithms.fraug`."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.common.fraug_networks import Generator, RTNet
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.privacy.laplace import laplace_like

Pairs = list[tuple[Tensor, Tensor]]
"""Real embeddings [batch, width] that augmentation starts from, and their classes [batch]."""


@dataclass(frozen=True, kw_only=True)
class Embeddings(FedAvg):
    use_generator: bool = option(True, help="the shared generator; without it, noise goes into the RTNets")
    use_rtnet: bool = option(True, help="the clients' own networks; without them, the generator's output is mixed in")
    embeddings: str = option("both", choices=("u", "uc", "both"), help="what is augmented: batch, prototypes, or both")
    interpolate: bool = option(True, help="let the augmentation grow, λ = exp(γ(r−R)); without it, λ = 1")
    gamma: float = option(0.01, low=0, help="γ of λ; it counts in rounds, so fit it to their number (the paper's: 200)")
    latent: int = option(256, low=1, high=65536, help="width of the noise and of the RTNets' hidden layer")
    noise: str = option("normal", choices=("normal", "uniform"), help="distribution of the noise: N(0, I) or U[0, 1)")
    augmenter: str = option(
        "fraug",
        choices=("fraug", "uniform", "laplace", "gaussian"),
        help="what makes û: networks, or u plus plain noise",
    )
    noise_scale: float = option(
        0.1, above=0, help="γ of plain noise: U(−γ, γ), Lap(0, γ) or N(0, γ²) on each value of u"
    )
    conditional: bool = option(True, help="tell the generator and the RTNets the class")

    @property
    def generates(self) -> bool:
        """Whether there is a generator."""
        return self.use_generator and self.augmenter == "fraug"

    @property
    def transforms(self) -> bool:
        """Whether there are RTNets."""
        return self.use_rtnet and self.augmenter == "fraug"

    def check(self, problem: ProblemSpec) -> None:
        shape, size = problem.task.feature_shape, problem.batch_size
        if len(shape) != 1:
            found = "x".join(str(side) for side in shape) or "none, for want of a split point"
            raise UsageError(f"algorithm.name=fraug: needs features that are vectors, the model's are {found}")
        if self.augmenter == "fraug" and not self.generates and not self.transforms:
            raise UsageError("algorithm.use_generator=false, algorithm.use_rtnet=false: one of them has to augment")
        if size == 1 or (not problem.drop_last and any(n % size == 1 for n in problem.examples.values())):
            raise UsageError(
                f"local.batch_size={size}: algorithm.name=fraug cannot train its batch norm on a batch of one example; "
                "use another size, or local.drop_last=true"
            )

    def modules(self, task: Task) -> dict[str, nn.Module]:
        if len(task.feature_shape) != 1:
            return {}  # refused in `check`
        (width,), classes = task.feature_shape, task.num_classes if self.conditional else 0
        made: dict[str, nn.Module] = {}
        if self.generates:
            made["generator"] = Generator(self.latent, width, classes)
        if self.transforms:
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
        if not self.generates:
            return self.drawn(ctx, len(y), *ctx.task.feature_shape)
        return ctx.task.modules["generator"](work["generator"], self.drawn(ctx, len(y), self.latent), y, train=False)[0]

    def augmented(self, ctx: Context, work: State, anchors: Tensor, y: Tensor) -> Tensor:
        """û as the classifier gets to see it."""
        if self.augmenter != "fraug":
            return anchors + self.plain_noise(anchors)
        v, strength = self.generated(ctx, work, y), self.strength(ctx)
        if not self.transforms:
            return (1 - strength) * anchors + strength * v
        return anchors + strength * ctx.task.modules["rtnet"](work["rtnet"], v, y, train=False)[0]

    def plain_noise(self, anchors: Tensor) -> Tensor:
        """Δu of the paper's noise baselines (table 7), in the shape of `anchors`."""
        if self.augmenter == "laplace":
            return laplace_like(anchors, self.noise_scale)
        draw = torch.randn if self.augmenter == "gaussian" else torch.rand
        drawn = draw(anchors.shape, device=anchors.device)
        return self.noise_scale * (drawn if self.augmenter == "gaussian" else 2 * drawn - 1)
