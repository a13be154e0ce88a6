"""Mechanisms of differential privacy, and the caveats about their guarantees that are printed before a run.

The Laplace mechanism protects vectors. The Gaussian mechanism is DP-SGD with Opacus. Privacy accounting is by Rényi
differential privacy: neighbouring data sets differ by the addition or removal of one row. The number of rows is public.
Noise comes from torch's generators: anyone with the seed can remove it, and it is not hardened against floating-point
attacks.
"""

import functools
import warnings
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.optim import SGD
from rayfed.core.trees import Weights

SIMULATION_NOTE = (
    "noise is drawn from the run's seed and recorded scores are exact: this measures the cost of privacy, it protects "
    "nobody"
)


def large_delta_note(delta: float, count: int, unit: str) -> tuple[str, ...]:
    """Return a note if δ is not below 1/`count`, for `count` protected units that are called `unit` in the plural."""
    if delta * count < 1:
        return ()
    note = f"δ={delta:g} is not below 1/{count}: publishing one of the {count} {unit} in the clear would satisfy it"
    return (note,)


# The Laplace mechanism, and the normalisations that bound its sensitivity

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


# The Gaussian mechanism. Opacus takes two seconds to import: functions import it.


def orders() -> list[float]:
    """Return the orders of Rényi divergence for the accounting; every order gives a valid bound.

    Opacus's default orders end at 63, which cannot give ε below 0.1 at δ = 1e-5.
    """
    from opacus.accountants import RDPAccountant

    return [1.01, 1.03, *RDPAccountant.DEFAULT_ALPHAS, 80, 112, 160, 256, 512, 1024]


def check_budget(epsilon: float, delta: float, steps: int) -> None:
    """Raise a `UsageError` if no amount of noise makes `steps` steps (ε, δ)-differentially private."""
    from opacus.accountants.utils import MAX_SIGMA

    smallest = epsilon_spent(MAX_SIGMA / 2, delta, rate=1.0, steps=steps)
    if smallest >= epsilon:
        raise UsageError(
            f"algorithm.epsilon={epsilon:g}: no amount of noise keeps {steps} steps below ε={smallest:.3g} at "
            f"δ={delta:g}; increase algorithm.epsilon or algorithm.delta"
        )


@functools.cache  # the search takes seconds, and every trial of a sweep needs the same σ
def noise_multiplier(epsilon: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the smallest σ that makes `steps` steps on Poisson-sampled batches (ε, δ)-differentially private.

    A batch contains each row with probability `rate`. The σ returned spends ε to within 0.2 %. `check_budget` says
    beforehand whether any amount of noise is enough.
    """
    from opacus.accountants.utils import get_noise_multiplier

    target = {"target_epsilon": epsilon, "target_delta": delta, "epsilon_tolerance": 0.002 * epsilon}
    with warnings.catch_warnings(action="ignore"):  # more orders would give slightly tighter bounds
        sigma: float = get_noise_multiplier(**target, sample_rate=rate, steps=steps, accountant="rdp", alphas=orders())
    return sigma


def epsilon_spent(sigma: float, delta: float, *, rate: float, steps: int) -> float:
    """Return the ε spent by `steps` steps with noise multiplier `sigma` and sampling rate `rate`."""
    from opacus.accountants.analysis.rdp import get_privacy_spent

    if not steps:
        return 0.0
    divergence = _rdp_of_a_step(sigma, rate) * steps
    with warnings.catch_warnings(action="ignore"):
        epsilon, _ = get_privacy_spent(orders=orders(), rdp=divergence, delta=delta)
    return max(0.0, float(epsilon))  # negative if δ alone is enough


@functools.cache  # all steps cost the same, and the computation takes a third of a second
def _rdp_of_a_step(sigma: float, rate: float) -> np.ndarray:
    """Return the Rényi divergence of one step at each of `orders`; several steps have a multiple of it."""
    from opacus.accountants.analysis.rdp import compute_rdp

    divergences = compute_rdp(q=rate, noise_multiplier=sigma, steps=1, orders=orders())
    return np.asarray(divergences)


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
