"""Euclidean projection onto the probability simplex and its extrapolated kin, for AFL and Gen-AFL.

Δ(m) = {x ≥ m, Σx = 1}, m < 1/n: x_i = max(y_i + τ, m), with τ such that the sum is 1 (Duchi et al. 2008 for m = 0).
That is what de Luca et al. 2022, Prop. 1, scale from Δ(0): (1 − n m) Π_Δ((y − m)/(1 − n m)) + m. Done as printed, the
scaling loses y where m is far below 0; here no number of m's size enters τ unless an x_i is at m.
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
    down = y.sort(descending=True).values
    free = torch.arange(1, n + 1, dtype=y.dtype, device=y.device)  # the j greatest are above `lowest`, the others at it
    shifts = (1 - (n - free) * lowest - down.cumsum(0)) / free
    last = int((down + shifts > lowest).sum()) - 1  # the condition holds for a prefix of the sorted numbers
    return (y + shifts[last]).clamp(min=lowest)
