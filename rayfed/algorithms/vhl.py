"""VHL: Tang et al. 2022, "Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated Learning",
Eq. 5, with the alignment loss of its code (`proxy_align_loss`).

All clients train on the same virtual data (v, y_v), generated from noise. z are features of unit length; sg stops the
gradient.

    client:  L = CE(x, y) + α CE(v, y_v) + S({z(x), sg z(v)}) + 0.1 S({z(v)})
    S:       supervised contrastive loss: mean over anchors a of −mean over b of a's class, b ≠ a, of
             log[exp(z_a·z_b/τ) / Σ_{c≠a} exp(z_a·z_c/τ)]; an anchor alone in its class adds 0 to the mean
             with Mixup, the mean over b has the weights ⟨ỹ_a, ỹ_b⟩
    server:  FedAvg; before the first round it sends the virtual data to all clients, once

The paper draws the virtual images from an untrained StyleGAN2. Here a smaller random network replaces it, which is
never trained either and receives noise and a code of the class. The authors' code differs from this one in three ways:
virtual classes have their own outputs, C besides the C local ones, which the alignment matches (here they share the
local outputs); local and virtual data pass through the network as one batch, which matters with batch norm; and only
the first five local epochs align.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Context, Exchange, HandOut, ProblemSpec, State, Traits
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class VHL(FedAvg):
    name: ClassVar[str] = "vhl"
    reference: ClassVar[str] = "Tang et al. 2022, Eq. 5, with a random network in place of StyleGAN2"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits, computes_with_inputs=True, needs_split=True, requires_classes=True
    )

    alpha: float = option(1.0, low=0, help="α, weight of the virtual data's cross-entropy")
    align: float = option(1.0, low=0, help="weight of the contrastive terms; 0: no alignment")
    temperature: float = option(0.07, above=0, help="τ of the contrastive loss")
    virtual_examples: int = option(2000, low=2, high=1_000_000, help="virtual examples, balanced; 20000 for CIFAR-100")
    virtual_batch_size: int = option(32, low=2, help="virtual examples per step")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)

    def init(self, ctx: Context) -> State:
        x, y = virtual_data(ctx.task.inputs.shape, ctx.task.num_classes, self.virtual_examples)
        return super().init(ctx) | {"virtual": {"x": x.to(ctx.task.device), "y": y.to(ctx.task.device)}}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (HandOut(("virtual",)),)

    def start(self, ctx: Context, client: State, down: State) -> State:
        order = torch.randperm(self.virtual_examples).to(ctx.task.device)
        return super().start(ctx, client, down) | {"virtual": client["virtual"], "order": order}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        positions = torch.arange(self.virtual_batch_size, device=loss.device) + ctx.step * self.virtual_batch_size
        rows = work["order"][positions % self.virtual_examples]
        x, y = (work["virtual"][name][rows] for name in ("x", "y"))
        virtual = ctx.task.forward(weights, x)  # its buffers are dropped: only x updates running statistics
        loss = loss + self.alpha * ctx.task.loss(virtual.logits, y, weights)
        if not self.align:
            return loss, output
        z, z_virtual = (F.normalize(part.features.flatten(1)) for part in (output, virtual))
        labels, y = (soft(each, ctx.task) for each in (batch.y, y))
        alignment = contrast(torch.cat([z, z_virtual.detach()]), torch.cat([labels, y]), self.temperature)
        return loss + self.align * (alignment + 0.1 * contrast(z_virtual, y, self.temperature)), output


def contrast(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss S, a scalar, of unit features z [n, d] with class shares y [n, C]."""
    others = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(~others, float("-inf"))
    same_class = (y @ y.T) * others
    log_probabilities = (F.log_softmax(logits, 1).masked_fill(~others, 0.0) * same_class).sum(1)
    return -(log_probabilities / same_class.sum(1).clamp(min=1e-12)).mean()


# Virtual data

NOISE, CODE, WIDTH = 64, 64, 32


@torch.no_grad()
def virtual_data(shape: tuple[int, ...], classes: int, count: int) -> tuple[Tensor, Tensor]:
    """Generate labelled virtual data with a random network.

    Noise and a random code of the class pass through a linear layer and, for images, through two convolutions with
    upsampling before each, so that neighbouring pixels are similar. All draws, including the network's weights, come
    from torch's generator.

    Returns:
        x [count, *shape] with mean 0 and standard deviation 1, and y [count], in which the classes take turns.
    """
    y = torch.arange(count) % classes
    inputs = torch.cat([torch.randn(count, NOISE), 3 * torch.randn(classes, CODE)[y]], 1)
    if len(shape) != 3:
        size = torch.Size(shape).numel()
        x = nn.Sequential(nn.Linear(NOISE + CODE, 128), nn.LeakyReLU(0.2), nn.Linear(128, size))(inputs)
        return _standardised(x).view(count, *shape), y
    channels, height, width = shape
    quarter, half = ([-(-side // divisor) for side in (height, width)] for divisor in (4, 2))
    linear, first = nn.Linear(NOISE + CODE, WIDTH * quarter[0] * quarter[1]), nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    last = nn.Conv2d(WIDTH, channels, 3, padding=1)
    blocks = []
    for rows in inputs.split(500):
        x = F.leaky_relu(linear(rows), 0.2).view(-1, WIDTH, *quarter)
        x = F.leaky_relu(first(F.interpolate(x, half, mode="bilinear")), 0.2)
        blocks.append(last(F.interpolate(x, (height, width), mode="bilinear")))
    return _standardised(torch.cat(blocks)), y


def _standardised(x: Tensor) -> Tensor:
    return (x - x.mean()) / x.std()
