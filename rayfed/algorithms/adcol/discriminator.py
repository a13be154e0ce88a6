"""ADCOL's discriminator: its architectures, the divergence that clients minimise, and its evaluation."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Context, State
from rayfed.core.network import Network, weights_of
from rayfed.core.trees import Weights, tree_map


def divergence(logits: Tensor) -> Tensor:
    """Return KL(uniform ‖ softmax(logits)), the mean over the batch; its gradient per row is softmax − 1/N."""
    return -math.log(logits.shape[1]) - F.log_softmax(logits, 1).mean()


class ResNetDiscriminator(nn.Module):
    """A torchvision ResNet on vectors [batch, width].

    Each vector is reshaped to two channels of a square, padded with zeros.
    """

    def __init__(self, kind: str, width: int, outputs: int):
        super().__init__()
        self.side = math.ceil(math.sqrt(width / 2))
        self.padding = 2 * self.side**2 - width
        from torchvision import models

        self.net = getattr(models, kind)(num_classes=outputs)
        self.net.conv1 = nn.Conv2d(2, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.net(F.pad(z, (0, self.padding)).unflatten(1, (2, self.side, self.side)))


@torch.no_grad()
def evaluate_discriminator(network: Network, weights: Weights, z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return (mean cross-entropy, accuracy in [0, 1]) on (z, labels), in evaluation mode."""
    logits = torch.cat([network(weights, chunk, train=False)[0] for chunk in z.split(512)])
    return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()


@dataclass(frozen=True)
class DiscriminatorMemory:
    """The discriminators of the last `size` rounds, the one just received included.

    The client's state holds the earlier ones, newest first: `earlier_discriminators`, weights [size − 1, ...], and
    `received_in`, the round [size − 1] of each, 0 where there is none yet. With `size` 1 nothing is kept.
    """

    size: int

    def join(self, ctx: Context) -> State:
        """Return the additions to a client's initial state."""
        earlier, device = self.size - 1, ctx.task.device
        if not earlier:
            return {}
        template = weights_of(ctx.task.modules["discriminator"].module)
        return {
            "earlier_discriminators": tree_map(
                lambda leaf: torch.zeros(earlier, *leaf.shape, dtype=leaf.dtype, device=leaf.device), template
            ),
            "received_in": torch.zeros(earlier, device=device),
        }

    def start(self, ctx: Context, client: State) -> State:
        """Return the additions to `work`: the earlier discriminators, and for each 1 if it is recent enough, else 0."""
        if self.size == 1:
            return {}
        # the discriminator of round 1 was never trained, so it counts in that round only
        in_use = (client["received_in"] > max(ctx.round - self.size, 1)).float()
        return {"earlier_discriminators": client["earlier_discriminators"], "in_use": in_use}

    def divergence(self, ctx: Context, work: State, newest: Weights, z: Tensor) -> Tensor:
        """Return the mean divergence at `z` [batch, width]. Discriminators are frozen and run in evaluation mode."""

        def single(weights: Weights) -> Tensor:
            return divergence(ctx.task.modules["discriminator"](weights, z, train=False)[0])

        total = single(newest)
        if self.size == 1:
            return total
        in_use = work["in_use"]
        earlier = [
            in_use[k] * single(tree_map(lambda leaf, k=k: leaf[k], work["earlier_discriminators"]))
            for k in range(len(in_use))
        ]
        return (total + torch.stack(earlier).sum()) / (1 + in_use.sum())

    def finish(self, ctx: Context, client: State, down: State) -> State:
        """Return the changes of the client's state: the newest discriminator is added, the oldest dropped."""
        if self.size == 1:
            return {}
        earlier, rounds = client["earlier_discriminators"], client["received_in"]
        newest_first = {name: torch.cat([new[None], earlier[name]]) for name, new in down["discriminator"].items()}
        rounds = torch.cat([torch.full_like(rounds[:1], ctx.round), rounds])
        return {
            "earlier_discriminators": {name: value[:-1] for name, value in newest_first.items()},
            "received_in": rounds[:-1],
        }
