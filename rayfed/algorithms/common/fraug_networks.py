"""FRAug's networks, its schedule of classes and its entropy."""

import torch
from torch import Tensor, nn

from rayfed.algorithms.common.prototypes import one_hot


class Generator(nn.Module):
    """g(z, y): noise [batch, latent] and classes to client-agnostic embeddings v [batch, width], non-negative."""

    def __init__(self, latent: int, width: int, classes: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(*_layer(latent + classes, width), nn.ReLU(), *_layer(width, width), nn.ReLU())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, one_hot(y, self.classes)], 1))


class RTNet(nn.Module):
    """m(v, y): embeddings [batch, width] and classes to residuals of a client [batch, width], of either sign."""

    def __init__(self, latent: int, width: int, classes: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(*_layer(width + classes, latent), nn.ReLU(), *_layer(latent, width))

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([v, one_hot(y, self.classes)], 1))


def _layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)


def cycled(seen: Tensor, position: Tensor, count: int) -> Tensor:
    """`count` classes in turn from `position` on, leaving out those that the client has never seen."""
    order = torch.argsort(seen.logical_not().int(), stable=True)
    turns = position + torch.arange(count, device=seen.device)
    return order[turns % seen.sum().clamp(min=1)]


def entropy(logits: Tensor) -> Tensor:
    """Shannon entropy of softmax(logits) in nats, mean over the batch; never negative."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()
