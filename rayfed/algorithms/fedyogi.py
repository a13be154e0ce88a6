"""FedYogi: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ;   v ← v − (1−β₂) Δ² sign(v − Δ²);   w_{t+1} = w_t + η_s m / (√v + τ)

FedAdam but for v, which moves by no more than a share of Δ² at a time.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithms.fedadam import FedAdam
from rayfed.core.trees import Weights, tree_map


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """As FedAvg in what is sent, kept and scored; the server keeps two moments of its updates."""

    name: ClassVar[str] = "fedyogi"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedYogi)"

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return tree_map(lambda v, s: v - (1 - self.beta2) * s * torch.sign(v - s), second, squares)
