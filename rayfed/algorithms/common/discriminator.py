"""What guesses from a representation whose it is (ADCOL): the networks, their training, and the clients' loss."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import server_batches
from rayfed.core import torchvision_cpu
from rayfed.core.network import Network, gradients
from rayfed.core.optim import SGD
from rayfed.core.trees import Weights, clone, only, without


def divergence(logits: Tensor) -> Tensor:
    """KL(uniform ‖ softmax(logits)), mean over the batch; its gradient per row is softmax − 1/N."""
    return -math.log(logits.shape[1]) - F.log_softmax(logits, 1).mean()


class ResNetDiscriminator(nn.Module):
    """A torchvision ResNet on vectors [batch, width], folded into two channels of a square; zeros fill what is left."""

    def __init__(self, kind: str, width: int, outputs: int):
        super().__init__()
        self.side = math.ceil(math.sqrt(width / 2))
        self.spare = 2 * self.side**2 - width
        torchvision_cpu.prepare()
        from torchvision import models

        self.net = getattr(models, kind)(num_classes=outputs)
        self.net.conv1 = nn.Conv2d(2, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, z: Tensor) -> Tensor:
        return self.net(F.pad(z, (0, self.spare)).unflatten(1, (2, self.side, self.side)))


def train_classifier(
    network: Network, weights: Weights, x: Tensor, y: Tensor, *, optimizer: SGD, batch_size: int, epochs: int
) -> Weights:
    """`weights` after `epochs` passes of cross-entropy on (x, y) in shuffled batches; momentum starts at zero."""
    weights = clone(weights)
    moments = optimizer.init(only(weights, network.parameters))
    for _ in range(epochs):
        for rows in server_batches(len(x), batch_size, x.device):
            some, labels = x[rows], y[rows]
            if network.buffers and len(rows) == 1:
                continue  # batch norm cannot train on one vector

            kept = without(weights, network.parameters)

            def loss(
                trained: Weights, some: Tensor = some, labels: Tensor = labels, kept: Weights = kept
            ) -> tuple[Tensor, Weights]:
                logits, buffers = network(trained | kept, some)
                return F.cross_entropy(logits, labels), buffers

            grads, _, buffers = gradients(loss, only(weights, network.parameters))
            optimizer.update_(weights, grads, moments)
            weights |= buffers
    return weights


@torch.no_grad()
def judge(network: Network, weights: Weights, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(mean cross-entropy, accuracy in [0, 1]) on (x, y), in evaluation mode."""
    logits = torch.cat([network(weights, some, train=False)[0] for some in x.split(512)])
    return F.cross_entropy(logits, y), (logits.argmax(1) == y).float().mean()
