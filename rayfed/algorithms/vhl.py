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
never trained either and receives noise and a code of the class. The authors' code differs from this one in three ways.
Virtual classes have their own outputs, C besides the C local ones, and the alignment matches them; here they share the
local outputs. Local and virtual data pass through the network as one batch, which matters with batch norm. Only the
first five local epochs align.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Context, Exchange, HandOut, ProblemSpec, State
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class VHL(FedAvg):
    name = "vhl"
    reference = "Tang et al. 2022, Eq. 5, with a random network in place of StyleGAN2"
    traits = replace(FedAvg.traits, computes_with_inputs=True, needs_split=True, requires_classes=True)

    alpha: float = option(1.0, low=0, help="α, weight of the virtual data's cross-entropy")
    align: float = option(1.0, low=0, help="weight of the contrastive terms; 0: no alignment")
    temperature: float = option(0.07, above=0, help="τ of the contrastive loss")
    virtual_examples: int = option(2000, low=2, high=1_000_000, help="virtual examples, balanced; 20000 for CIFAR-100")
    virtual_batch_size: int = option(32, low=2, help="virtual examples per step")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)

    def init(self, ctx: Context) -> State:
        x, y = virtual_data(ctx.task.inputs.shape, ctx.task.num_classes, self.virtual_examples)
        server = super().init(ctx)
        device = ctx.task.device
        server["virtual"] = {"x": x.to(device), "y": y.to(device)}
        return server

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (HandOut(("virtual",)),)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work["virtual"] = client["virtual"]
        work["order"] = torch.randperm(self.virtual_examples).to(ctx.task.device)
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        positions = torch.arange(self.virtual_batch_size, device=loss.device)
        positions = positions + ctx.step * self.virtual_batch_size
        rows = work["order"][positions % self.virtual_examples]
        v = work["virtual"]["x"][rows]
        y_v = work["virtual"]["y"][rows]
        virtual = ctx.task.forward(weights, v)  # its buffers are dropped: only x updates running statistics
        virtual_loss = ctx.task.loss(virtual.logits, y_v, weights)
        loss = loss + self.alpha * virtual_loss
        if self.align:
            alignment = self.alignment(ctx, output, batch.y, virtual, y_v)
            loss = loss + self.align * alignment
        return loss, output

    def alignment(self, ctx: Context, local: Output, y: Tensor, virtual: Output, y_v: Tensor) -> Tensor:
        """Return S({z(x), sg z(v)}) + 0.1 S({z(v)}) for the outputs on x and on v with their classes."""
        z = F.normalize(local.features.flatten(1))
        z_v = F.normalize(virtual.features.flatten(1))
        labels = soft(y, ctx.task)
        labels_v = soft(y_v, ctx.task)
        together = torch.cat([z, z_v.detach()])
        of_both = contrast(together, torch.cat([labels, labels_v]), self.temperature)
        of_virtual = contrast(z_v, labels_v, self.temperature)
        return of_both + 0.1 * of_virtual


def contrast(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """Return the supervised contrastive loss S, a scalar, of unit features z [n, d] with class shares y [n, C]."""
    is_self = torch.eye(len(z), dtype=torch.bool, device=z.device)
    similarities = z @ z.T / temperature
    logits = similarities.masked_fill(is_self, float("-inf"))
    log_p = F.log_softmax(logits, 1).masked_fill(is_self, 0.0)
    same_class = (y @ y.T) * ~is_self
    sums = (log_p * same_class).sum(1)
    counts = same_class.sum(1).clamp(min=1e-12)
    return -(sums / counts).mean()


# Virtual data

NOISE = 64
"""The width of the noise of which virtual data are made."""
CODE = 64
"""The width of a class's code."""
WIDTH = 32
"""The channels between the convolutions."""


@torch.no_grad()
def virtual_data(shape: tuple[int, ...], classes: int, count: int) -> tuple[Tensor, Tensor]:
    """Generate labelled virtual data with a random network.

    All draws, including the network's weights, come from torch's generator.

    Returns:
        x [count, *shape] with mean 0 and standard deviation 1, and y [count], in which the classes take turns.
    """
    y = torch.arange(count) % classes
    noise = torch.randn(count, NOISE)
    codes = 3 * torch.randn(classes, CODE)
    inputs = torch.cat([noise, codes[y]], 1)
    if len(shape) == 3:
        x = virtual_images(inputs, shape)
    else:
        first = nn.Linear(NOISE + CODE, 128)
        last = nn.Linear(128, math.prod(shape))
        hidden = F.leaky_relu(first(inputs), 0.2)
        x = last(hidden).view(count, *shape)
    return (x - x.mean()) / x.std(), y


def virtual_images(inputs: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return images [n, *shape] that random layers make of `inputs` [n, NOISE + CODE].

    A linear layer is followed by two convolutions with upsampling before each, so that neighbouring pixels are similar.
    """
    channels, height, width = shape
    quarter = [math.ceil(height / 4), math.ceil(width / 4)]
    half = [math.ceil(height / 2), math.ceil(width / 2)]
    linear = nn.Linear(NOISE + CODE, WIDTH * math.prod(quarter))
    first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
    last = nn.Conv2d(WIDTH, channels, 3, padding=1)
    blocks = []
    for rows in inputs.split(500):
        x = F.leaky_relu(linear(rows), 0.2).view(-1, WIDTH, *quarter)
        x = F.interpolate(x, half, mode="bilinear")
        x = F.leaky_relu(first(x), 0.2)
        x = F.interpolate(x, (height, width), mode="bilinear")
        blocks.append(last(x))
    return torch.cat(blocks)
