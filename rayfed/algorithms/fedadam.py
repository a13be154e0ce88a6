"""FedAdam: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ;   v ← β₂ v + (1−β₂) Δ²;   w_{t+1} = w_t + η_s m / (√v + τ)

m starts from 0 and v from τ²; there is no bias correction. Defaults are those of the paper. The authors' public trainer
runs the Adam of Keras instead: v starts from 0, moments are corrected, and β₂ is 0.999.
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithms.common.adaptive_server import AdaptiveServer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, scale


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveServer):
    """As FedAvg in what is sent, kept and scored; the server keeps two moments of its updates."""

    name: ClassVar[str] = "fedadam"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedAdam)"

    beta2: float = option(0.99, low=0, below=1, help="β₂, decay of the mean squared update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(scale(second, self.beta2), squares, alpha=1 - self.beta2)
