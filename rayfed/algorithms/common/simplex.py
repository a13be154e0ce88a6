"""Euclidean projection onto the probability simplex and its extrapolated form, for AFL and Gen-AFL.

Δ(m) = {x ≥ m, Σx = 1}, m ≤ 1/n. The projection of y is x_i = max(y_i + τ, m), with τ such that the sum is 1 (Duchi et
al. 2008 for m = 0). It equals the scaling from Δ(0) of de Luca et al. 2022, Prop. 1: (1 − n m) Π_Δ((y − m)/(1 − n m)) +
m. That scaling loses the digits of y where m is far below 0; the form used here does not.
"""

import torch
from torch import Tensor


def project_simplex(y: Tensor, lowest: float = 0.0) -> Tensor:
    """Return the point of {x ≥ lowest, Σx = 1} that is nearest to `y` [n].

    Raises:
        ValueError: `lowest` is greater than 1/n, so that there is no such point.
    """
    n = len(y)
    size = 1 - n * lowest
    if size < 0 and abs(size) > 1e-9:
        raise ValueError(f"lowest={lowest}: {n} numbers of at least that sum to more than 1")
    if abs(size) <= 1e-9:
        return torch.full_like(y, 1 / n)
    device, y = y.device, y.cpu()  # CUDA has no deterministic `cumsum`
    descending = y.sort(descending=True).values
    free = torch.arange(1, n + 1, dtype=y.dtype)  # the `free` largest are above `lowest`
    shifts = (1 - (n - free) * lowest - descending.cumsum(0)) / free
    last = int((descending + shifts > lowest).sum()) - 1  # the condition holds for a prefix of the sorted numbers
    return (y + shifts[last]).clamp(min=lowest).to(device)
