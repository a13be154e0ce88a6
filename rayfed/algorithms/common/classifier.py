"""Training of a classifier beside the model, as ADCOL's and FADA's servers train their discriminators."""

import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import server_batches
from rayfed.core.network import Network, gradients
from rayfed.core.optim import SGD
from rayfed.core.trees import Weights, clone, only, without


def train_classifier(
    network: Network, weights: Weights, x: Tensor, y: Tensor, *, optimizer: SGD, batch_size: int, epochs: int
) -> Weights:
    """Return `weights` after `epochs` passes of cross-entropy on (x, y) in shuffled batches.

    Momentum starts at zero. A network with batch norm skips a last batch of a single example.
    """
    weights = clone(weights)
    moments = optimizer.init(only(weights, network.parameters))
    for _ in range(epochs):
        for rows in server_batches(len(x), batch_size, x.device):
            inputs, labels = x[rows], y[rows]
            if network.buffers and len(rows) == 1:
                continue  # batch norm cannot train on one example

            buffers = without(weights, network.parameters)

            def loss(
                trained: Weights, inputs: Tensor = inputs, labels: Tensor = labels, buffers: Weights = buffers
            ) -> tuple[Tensor, Weights]:
                logits, new_buffers = network(trained | buffers, inputs)
                return F.cross_entropy(logits, labels), new_buffers

            grads, _, new_buffers = gradients(loss, only(weights, network.parameters))
            optimizer.update_(weights, grads, moments)
            weights |= new_buffers
    return weights
