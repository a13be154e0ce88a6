"""Plain MLPs beside the model, and ADCOL's training of one as a discriminator on the server."""

import itertools
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import server_batches
from rayfed.network import Network, gradients
from rayfed.optim import SGD
from rayfed.tree import Weights, clone


def mlp(widths: Sequence[int], *, linear: bool = False) -> nn.Sequential:
    """Linear layers from width to width with ReLU between them; `linear` leaves the ReLUs out."""
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    layers.pop()
    return nn.Sequential(*(layer for layer in layers if not linear or isinstance(layer, nn.Linear)))


def train_classifier(
    network: Network, weights: Weights, x: Tensor, y: Tensor, *, optimizer: SGD, batch_size: int, epochs: int
) -> Weights:
    """`weights` after `epochs` passes of cross-entropy on (x, y) in shuffled batches; momentum starts at zero."""
    weights = clone(weights)
    moments = optimizer.init(weights)
    for _ in range(epochs):
        for rows in server_batches(len(x), batch_size, x.device):
            some, labels = x[rows], y[rows]

            def loss(trained: Weights, some: Tensor = some, labels: Tensor = labels) -> tuple[Tensor, Weights]:
                return F.cross_entropy(network(trained, some)[0], labels), {}

            grads, _, _ = gradients(loss, weights)
            optimizer.update_(weights, grads, moments)
    return weights
