"""FedAdagrad: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ;   v ← v + Δ²;   w_{t+1} = w_t + η_s m / (√v + τ)

FedAdam but for v, which only grows; m starts from 0 and v from τ². The paper's experiments have β₁ = 0, so that m is Δ.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.common.adaptive_server import AdaptiveServer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveServer):
    """As FedAvg in what is sent, kept and scored; the server keeps the sum of its squared updates, and their mean."""

    name: ClassVar[str] = "fedadagrad"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedAdagrad)"

    beta1: float = option(0.0, low=0, below=1, help="β₁, decay of the mean update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(second, squares)
