"""Maximum mean discrepancy: Gretton et al. 2012, "A Kernel Two-Sample Test", with five Gaussian kernels.

    MMD²(X, Y) = mean k(X, X) + mean k(Y, Y) − 2 · mean k(X, Y)      (biased: each point is also compared with itself)
    k(a, b) = Σ_{j=0..4} exp(−‖a − b‖² / (σ̄ · 2^{j−2})),  σ̄ the mean squared distance between different points of X ∪ Y

σ̄ follows the data but passes no gradient. So the value does not depend on the scale of the points and lies between 0
and 10. For one point against one it is the same constant at any distance.
"""

import torch
from torch import Tensor

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
