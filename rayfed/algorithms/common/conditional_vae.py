"""A conditional variational autoencoder of MLPs (Sohn, Lee and Yan 2015), trained on a few labelled inputs.

L = mean over the batch of  ½‖x − d(z, y)‖² + KL(N(m, s²) ‖ N(0, I)),   (m, log s²) = e(x, y),  z = m + s ε
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rayfed.algorithm import Context
from rayfed.algorithms.common.mlp import mlp
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.core.network import Network, gradients
from rayfed.core.optim import Adam
from rayfed.core.trees import Weights, clone


class Encoder(nn.Module):
    """e: inputs [n, *shape] and classes [n] to (m, log s²), each [n, noise]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.layers = classes, mlp([math.prod(shape) + classes, hidden, 2 * noise])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.layers(torch.cat([x.flatten(1), one_hot(y, self.classes)], 1)).chunk(2, 1)
        return mean, log_variance


class Decoder(nn.Module):
    """d: noise [n, noise] and classes [n] to inputs [n, *shape]."""

    def __init__(self, noise: int, hidden: int, classes: int, shape: Sequence[int]):
        super().__init__()
        self.classes, self.shape = classes, tuple(shape)
        self.layers = mlp([noise + classes, hidden, math.prod(shape)])

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return self.layers(torch.cat([z, one_hot(y, self.classes)], 1)).unflatten(1, self.shape)


def vae_loss(
    encoder: Network, decoder: Network, weights: dict[str, Weights], x: Tensor, y: Tensor, noise: Tensor
) -> Tensor:
    """L for the noise ε [n, noise]."""
    mean, log_variance = encoder(weights["encoder"], x, y)[0]
    made = decoder(weights["decoder"], mean + (log_variance / 2).exp() * noise, y)[0]
    apart = (x - made).flatten(1).square().sum(1) / 2
    kl = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (apart + kl).mean()


def trained_decoder(
    ctx: Context, decoder: Weights, x: Tensor, y: Tensor, *, noise: int, lr: float, steps: int, batch_size: int
) -> Weights:
    """The decoder after `steps` steps, with a new encoder, on batches drawn from (x, y); torch's generator."""
    modules = ctx.task.modules
    parts = {"encoder": modules["encoder"].draw_weights(), "decoder": clone(decoder)}
    flat = {f"{part}/{name}": value for part, weights in parts.items() for name, value in weights.items()}
    adam = Adam(lr=lr)
    moments = adam.init(flat)
    for _ in range(steps):
        rows = torch.randint(len(x), (batch_size,)).to(x.device)
        epsilon = torch.randn(batch_size, noise, device=x.device)

        def loss(trained: Weights, rows: Tensor = rows, epsilon: Tensor = epsilon) -> tuple[Tensor, Weights]:
            split = {part: _named(trained, part) for part in parts}
            return vae_loss(modules["encoder"], modules["decoder"], split, x[rows], y[rows], epsilon), {}

        grads, _, _ = gradients(loss, flat)
        adam.update_(flat, grads, moments)
    return _named(flat, "decoder")


def _named(flat: Weights, part: str) -> Weights:
    return {name.removeprefix(f"{part}/"): value for name, value in flat.items() if name.startswith(f"{part}/")}
