"""The Laplace mechanism for vectors, and the normalisations that bound its sensitivity.

Noise comes from torch's generators: anyone with the seed can remove it, and it is not hardened against floating-point
attacks.
"""

import torch
from torch import Tensor

EPS = 1e-12
"""Lower bound of denominators and of the argument of the logarithm."""


def laplace_like(x: Tensor, scale: float) -> Tensor:
    """Draw noise with density e^{−|v|/scale} / (2·scale) in the shape of `x`."""
    u = torch.rand(x.shape, device=x.device, dtype=torch.float64).sub_(0.5)
    return (-scale * u.sign() * torch.log1p((-2 * u.abs()).clamp(min=-1 + EPS))).to(x.dtype)


def to_unit_range(z: Tensor) -> Tensor:
    """Rescale each row of `z` [batch, width] to the range [0, 1]; a constant row becomes 0."""
    low, high = z.amin(1, keepdim=True), z.amax(1, keepdim=True)
    return (z - low) / (high - low).clamp(min=EPS)


def to_half_l1_ball(z: Tensor) -> Tensor:
    """Scale each row to an L1 norm of 1/2, so that the L1 distance of two rows is at most 1; a zero row stays zero."""
    return z / (2 * z.abs().sum(1, keepdim=True)).clamp(min=EPS)
