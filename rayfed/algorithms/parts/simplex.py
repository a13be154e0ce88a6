"""Euclidean projection onto the probability simplex and its extrapolated kin, for AFL and Gen-AFL.

Δ = {x ≥ 0, Σx = 1}: x_i = max(y_i + τ, 0), with τ such that the sum is 1 (Duchi et al. 2008)
Δ(m) = {x ≥ m, Σx = 1}, m < 1/n: x = (1 − n m) Π_Δ((y − m)/(1 − n m)) + m (de Luca et al. 2022, Prop. 1)
"""

import torch
from torch import Tensor


def project_simplex(y: Tensor, lowest: float = 0.0) -> Tensor:
    """The point of {x ≥ lowest, Σx = 1} nearest to `y` [n]; with lowest = 1/n that set is one point, all 1/n."""
    n = len(y)
    size = 1 - n * lowest
    if size < 0 and abs(size) > 1e-9:
        raise ValueError(f"lowest={lowest} leaves nothing: {n} numbers of at least that sum to more than 1")
    if abs(size) <= 1e-9:
        return torch.full_like(y, 1 / n)
    inner = (y - lowest) / size
    down = inner.sort(descending=True).values
    shifts = (1 - down.cumsum(0)) / torch.arange(1, n + 1, dtype=y.dtype, device=y.device)
    last = int((down + shifts > 0).sum()) - 1  # the condition holds for a prefix of the sorted numbers
    return size * (inner + shifts[last]).clamp(min=0) + lowest
