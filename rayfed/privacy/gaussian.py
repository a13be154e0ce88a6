"""DP-SGD with Opacus, the Gaussian mechanism, and the accounting of both by Rényi differential privacy.

Neighbours differ by one row that is there or not; how many rows there are is no secret. Noise comes of torch's
generators, so whoever has the seed can take it away, and it is not hardened against attacks on floating point.
"""

import warnings

import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from opacus.accountants import RDPAccountant
from opacus.accountants.utils import MAX_SIGMA, get_noise_multiplier
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.trees import Weights

# Every order gives a valid bound. Opacus's own end at 63, which cannot show less than ε = 0.1 at δ = 1e-5
ORDERS = [1.01, 1.03, *RDPAccountant.DEFAULT_ALPHAS, 80, 112, 160, 256, 512, 1024]


def check_budget(epsilon: float, delta: float, steps: int) -> None:
    """Raises UsageError if no noise keeps `steps` steps to (ε, δ)."""
    least = epsilon_spent(MAX_SIGMA / 2, delta, rate=1.0, steps=steps)
    if least >= epsilon:
        raise UsageError(
            f"algorithm.epsilon={epsilon:g}: no noise keeps {steps} steps below ε={least:.3g} at δ={delta:g}; "
            "use a greater algorithm.epsilon or algorithm.delta"
        )


def noise_multiplier(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """The least σ, to within 0.2% of ε, with which `steps` steps on Poisson batches of rate `rate` keep to (ε, δ).

    Raises:
        UsageError: no noise is enough.
    """
    check_budget(epsilon, delta, steps)
    goal = {"target_epsilon": epsilon, "target_delta": delta, "epsilon_tolerance": 0.002 * epsilon}
    with warnings.catch_warnings(action="ignore"):  # of bounds that more orders would make a little tighter
        return get_noise_multiplier(**goal, sample_rate=rate, steps=steps, accountant="rdp", alphas=ORDERS)


def epsilon_spent(sigma: float, delta: float, *, rate: float, steps: int) -> float:
    """ε that `steps` such steps have spent."""
    if not steps:
        return 0.0
    accountant = RDPAccountant()
    accountant.history = [(sigma, rate, steps)]
    with warnings.catch_warnings(action="ignore"):
        return max(0.0, float(accountant.get_epsilon(delta, alphas=ORDERS)))  # less than 0: δ alone is enough


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
