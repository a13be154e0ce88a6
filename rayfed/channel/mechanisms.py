"""Mechanisms of differential privacy: Laplace noise for vectors, and DP-SGD.

Noise comes from torch's generators: anyone with the seed can remove it, and it is not hardened against floating-point
attacks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.trees import Weights

EPS = 1e-12
"""Lower bound of denominators and of the argument of the logarithm."""


def laplace_like(x: Tensor, scale: float) -> Tensor:
    """Draw noise with density e^{−|v|/scale} / (2·scale) in the shape of `x`."""
    u = torch.rand(x.shape, device=x.device, dtype=torch.float64)
    u = u.sub_(0.5)
    tail = (-2 * u.abs()).clamp(min=-1 + EPS)
    noise = -scale * u.sign() * torch.log1p(tail)
    return noise.to(x.dtype)


def to_unit_range(z: Tensor) -> Tensor:
    """Rescale each row of `z` [batch, width] to the range [0, 1]; a constant row becomes 0."""
    low = z.amin(1, keepdim=True)
    high = z.amax(1, keepdim=True)
    return (z - low) / (high - low).clamp(min=EPS)


def to_half_l1_ball(z: Tensor) -> Tensor:
    """Scale each row to an L1 norm of 1/2, so that the L1 distance of two rows is at most 1; a zero row stays zero."""
    norms = z.abs().sum(1, keepdim=True)
    return z / (2 * norms).clamp(min=EPS)


def train_privately(
    module: nn.Module,
    weights: Weights,
    x: Tensor,
    y: Tensor,
    *,
    optimizer: SGD,
    rate: float,
    steps: int,
    sigma: float,
    clip: float,
) -> Weights:
    """Train by DP-SGD on the cross-entropy of (x, y).

    A batch contains every row with probability `rate`. Per-row gradients are clipped to an L2 norm of `clip`. Gaussian
    noise with standard deviation σ·clip is added to their sum, which is divided by the expected batch size.

    Returns the next `weights`. The network `module` is modified and must not be used afterwards.
    """
    module.load_state_dict(weights)
    expected = max(1, round(rate * len(x)))
    private, sgd = _private(module, optimizer, sigma, clip, batch_size=expected)
    with torch.enable_grad():
        for _ in range(steps):
            is_drawn = torch.rand(len(x)) < rate
            rows = is_drawn.nonzero().flatten().to(x.device)
            sgd.zero_grad()
            inputs = x[rows].requires_grad_()  # required by Opacus's hooks
            loss = F.cross_entropy(private(inputs), y[rows], reduction="sum")
            loss.backward()
            sgd.step()
    return weights_of(module)


def _private(module: nn.Module, optimizer: SGD, sigma: float, clip: float, *, batch_size: int) -> tuple[Any, Any]:
    """Return `module` with gradients per row, and the optimiser that clips them and adds noise."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    class DrawsOnCpu(DPOptimizer):  # type: ignore[misc]
        """Draws the noise on the CPU, so that it does not depend on the server's device."""

        def add_noise(self) -> None:
            self.noise_multiplier = 0.0
            super().add_noise()  # moves the clipped gradients to their place
            self.noise_multiplier = sigma
            for parameter in self.params:
                grad = parameter.grad
                noise = torch.normal(0.0, sigma * clip, grad.shape, dtype=grad.dtype)
                grad += noise.to(grad.device)

    private: Any = GradSampleModule(module, loss_reduction="sum")
    sgd = torch.optim.SGD(
        private.parameters(),
        lr=optimizer.lr,
        momentum=optimizer.momentum,
        weight_decay=optimizer.weight_decay,
        nesterov=optimizer.nesterov,
    )
    return private, DrawsOnCpu(sgd, noise_multiplier=sigma, max_grad_norm=clip, expected_batch_size=batch_size)
