"""FRAug's networks, prototypes, schedule of classes and entropy."""

import torch
from torch import Tensor, nn

from rayfed.algorithms.common.soft_labels import one_hot


class Generator(nn.Module):
    """g(z, y): maps noise [batch, latent] and classes to client-agnostic embeddings v [batch, width], non-negative."""

    def __init__(self, latent: int, width: int, classes: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(*_layer(latent + classes, width), nn.ReLU(), *_layer(width, width), nn.ReLU())

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, one_hot(y, self.classes)], 1))


class RTNet(nn.Module):
    """m(v, y): maps embeddings [batch, width] and classes to a client's residuals [batch, width], of either sign."""

    def __init__(self, latent: int, width: int, classes: int):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(*_layer(width + classes, latent), nn.ReLU(), *_layer(latent, width))

    def forward(self, v: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([v, one_hot(y, self.classes)], 1))


def _layer(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
    return nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs)


def update_prototypes(prototypes: Tensor, seen: Tensor, features: Tensor, y: Tensor, rate: float) -> Tensor:
    """Return the prototypes after a batch: ū_c ← (1 − rate)·ū_c + rate·(mean of class c in the batch).

    A class that is seen for the first time starts at its mean; a class that is not in the batch stays. `prototypes` is
    [classes, width], and `seen` [classes] says which classes were seen before.
    """
    members = one_hot(y, len(prototypes))
    counts = members.sum(0)[:, None]
    means = members.T @ features / counts.clamp(min=1)
    blend = torch.where(seen[:, None], (1 - rate) * prototypes + rate * means, means)
    return torch.where(counts > 0, blend, prototypes)


def cycled_classes(seen: Tensor, position: Tensor, count: int) -> Tensor:
    """Return the next `count` classes of a cycle over the classes that the client has seen, from `position` on."""
    order = torch.argsort(seen.logical_not().int(), stable=True)
    turns = position + torch.arange(count, device=seen.device)
    return order[turns % seen.sum().clamp(min=1)]


def entropy(logits: Tensor) -> Tensor:
    """Return the Shannon entropy of softmax(logits) in nats, averaged over the batch."""
    log_p = logits.log_softmax(1)
    return -(log_p.exp() * log_p).sum(1).mean()


KERNELS = 5


def mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return MMD² between the rows of `x` [n, d] and of `y` [m, d]."""
    points = torch.cat([x, y])
    points = points - points.mean(0).detach()  # distances stay the same, with less cancellation below
    norms = points.square().sum(1)
    distances = (norms[:, None] + norms - 2 * points @ points.T).clamp(min=0)
    count = len(points)
    bandwidth = (distances.detach().sum() / (count * (count - 1))).clamp(min=1e-12)
    bandwidths = [bandwidth * 2.0 ** (j - KERNELS // 2) for j in range(KERNELS)]
    kernel = torch.stack([(-distances / each).exp() for each in bandwidths]).sum(0)
    n = len(x)
    return kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
