"""DP-SGD on the server with Opacus, and its accounting by Rényi differential privacy."""

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from rayfed.errors import UsageError
from rayfed.network import weights_of
from rayfed.optim import SGD
from rayfed.tree import Weights


def noise_multiplier(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """σ with which `steps` steps on Poisson batches of rate `rate` spend at most (epsilon, delta)."""
    try:
        return get_noise_multiplier(
            target_epsilon=epsilon, target_delta=delta, sample_rate=rate, steps=steps, accountant="rdp"
        )
    except ValueError as error:
        raise UsageError(f"algorithm.epsilon={epsilon:g}: no noise is enough for {steps} steps ({error})") from error


def spent(sigma: float, delta: float, *, rate: float, steps: int) -> float:
    """ε that `steps` such steps have spent."""
    if not steps:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    return float(accountant.get_epsilon(delta))


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
    """`weights` after `steps` steps of DP-SGD on the cross-entropy of (x, y); `module` is used up.

    Every row is in a batch with probability `rate`; its gradient is clipped to `clip` in L2, noise of σ·clip is added
    to the sum, and the sum is divided by the expected size of a batch.
    """
    module.load_state_dict(weights)
    private = GradSampleModule(module, loss_reduction="sum")
    how = {"momentum": optimizer.momentum, "weight_decay": optimizer.weight_decay, "nesterov": optimizer.nesterov}
    sgd = DPOptimizer(
        torch.optim.SGD(private.parameters(), lr=optimizer.lr, **how),  # type: ignore[arg-type]
        noise_multiplier=sigma,
        max_grad_norm=clip,
        expected_batch_size=max(1, round(rate * len(x))),
    )
    with torch.enable_grad():
        for _ in range(steps):
            rows = (torch.rand(len(x), device=x.device) < rate).nonzero().flatten()
            sgd.zero_grad()
            inputs = x[rows].requires_grad_()  # Opacus's hooks want it so
            F.cross_entropy(private(inputs), y[rows], reduction="sum").backward()
            sgd.step()
    return weights_of(module)
