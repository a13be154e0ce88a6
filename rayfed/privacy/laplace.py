"""The Laplace mechanism on vectors, and the normalisations that bound what it has to hide.

Noise comes of torch's generators, so whoever has the seed can take it away, and it is not hardened against attacks on
floating point.
"""

import torch
from torch import Tensor

TINY = 1e-12


def laplace_like(x: Tensor, scale: float) -> Tensor:
    """Noise of density e^{−|v|/scale} / (2·scale) in the shape of `x`."""
    u = torch.rand(x.shape, device=x.device, dtype=torch.float64).sub_(0.5)
    return (-scale * u.sign() * torch.log1p((-2 * u.abs()).clamp(min=-1 + TINY))).to(x.dtype)


def to_unit_range(z: Tensor) -> Tensor:
    """Each row of `z` [batch, width] stretched to [0, 1]; a constant row becomes 0."""
    low, high = z.amin(1, keepdim=True), z.amax(1, keepdim=True)
    return (z - low) / (high - low).clamp(min=TINY)


def to_half_l1_ball(z: Tensor) -> Tensor:
    """Each row scaled to an L1 norm of 1/2, so that no two rows are more than 1 apart; a zero row stays."""
    return z / (2 * z.abs().sum(1, keepdim=True)).clamp(min=TINY)
