"""Accounting of differential privacy by Opacus, and the caveats about its guarantees that are printed before a run.

A step is a Gaussian mechanism on a batch that contains each row with probability `rate`; with rate 1 it contains all.
Below rate 1, neighbouring data sets differ by the addition or removal of one row, and the number of rows is public. At
rate 1 any notion of neighbours holds by which the sensitivity was taken.

`rdp` is Rényi accounting (Mironov 2017, 2019), an upper bound. `prv` composes the privacy loss numerically (Gopi, Lee
and Wutschitz 2021) and is tighter. Opacus takes two seconds to import, so functions import it.
"""

import functools
import warnings

import numpy as np

from rayfed.core.errors import UsageError

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


def orders() -> list[float]:
    """Return the orders of Rényi divergence for the accounting; every order gives a valid bound.

    Opacus's default orders end at 63, which cannot give ε below 0.1 at δ = 1e-5.
    """
    from opacus.accountants import RDPAccountant

    return [1.01, 1.03, *RDPAccountant.DEFAULT_ALPHAS, 80, 112, 160, 256, 512, 1024]


def check_budget(
    epsilon: float, delta: float, steps: int, *, rate: float = 1.0, where: str = "algorithm", key: str = "epsilon"
) -> None:
    """Raise a `UsageError` if no amount of noise makes `steps` steps (ε, δ)-differentially private.

    `where` is the group of the keys in the message, and `key` that of ε.
    """
    from opacus.accountants.utils import MAX_SIGMA

    smallest = epsilon_spent(MAX_SIGMA / 2, delta, rate=rate, steps=steps)
    if smallest >= epsilon:
        raise UsageError(
            f"{where}.{key}={epsilon:g}: no amount of noise keeps {steps} steps below ε={smallest:.3g} at "
            f"δ={delta:g}; increase {where}.{key} or {where}.delta"
        )


@functools.cache  # the search takes seconds, and every trial of a sweep needs the same σ
def noise_multiplier(epsilon: float, delta: float, *, rate: float, steps: int, accountant: str = "rdp") -> float:
    """Return the smallest σ that makes `steps` steps on Poisson-sampled batches (ε, δ)-differentially private.

    A batch contains each row with probability `rate`. The σ returned spends ε to within 0.2 %. `check_budget` says
    beforehand whether any amount of noise is enough.
    """
    from opacus.accountants.utils import get_noise_multiplier

    target = {"target_epsilon": epsilon, "target_delta": delta, "epsilon_tolerance": 0.002 * epsilon}
    if accountant == "rdp":
        more = {"alphas": orders()}
    else:
        more = {}
    with warnings.catch_warnings(action="ignore"):  # more orders would give slightly tighter bounds
        sigma: float = get_noise_multiplier(**target, sample_rate=rate, steps=steps, accountant=accountant, **more)
    return sigma


def epsilon_spent(sigma: float, delta: float, *, rate: float, steps: int, accountant: str = "rdp") -> float:
    """Return the ε spent by `steps` steps with noise multiplier `sigma` and sampling rate `rate`."""
    if not steps:
        return 0.0
    if accountant == "prv":
        return _epsilon_by_prv(sigma, delta, rate, steps)
    from opacus.accountants.analysis.rdp import get_privacy_spent

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


@functools.cache  # it takes up to a second
def _epsilon_by_prv(sigma: float, delta: float, rate: float, steps: int) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(sigma, rate, steps)]
    with warnings.catch_warnings(action="ignore"):
        return max(0.0, float(accountant.get_epsilon(delta)))
