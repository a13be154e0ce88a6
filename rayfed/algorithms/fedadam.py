"""FedAdam: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ;   v ← β₂ v + (1−β₂) Δ²;   w_{t+1} = w_t + η_s m / (√v + τ)

m starts from 0 and v from τ²; there is no bias correction.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import State
from rayfed.algorithms.parts.server_optimizer import ServerOptimizer
from rayfed.options import option
from rayfed.tree import Weights, add, scale, tree_map


@dataclass(frozen=True, kw_only=True)
class FedAdam(ServerOptimizer):
    """As FedAvg in what is sent, kept and scored; the server keeps two moments of its updates."""

    name: ClassVar[str] = "fedadam"
    source: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedAdam)"

    server_lr: float = option(0.01, above=0, help="η_s, step of the server")
    beta1: float = option(0.9, low=0, below=1, help="β₁, decay of the mean update")
    beta2: float = option(0.99, low=0, below=1, help="β₂, decay of the mean squared update")
    tau: float = option(1e-3, above=0, help="τ, degree of adaptivity: small steps adapt, a large τ is momentum alone")

    def moments(self, zeros: Weights) -> State:
        return {"first": zeros, "second": tree_map(lambda zero: torch.full_like(zero, self.tau**2), zeros)}

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(scale(second, self.beta2), squares, alpha=1 - self.beta2)

    def step_of(self, delta: Weights, state: State) -> tuple[Weights, State]:
        first = add(scale(state["first"], self.beta1), delta, alpha=1 - self.beta1)
        second = self.second_moment(state["second"], tree_map(torch.square, delta))
        step = tree_map(lambda m, v: self.server_lr * m / (v.sqrt() + self.tau), first, second)
        return step, {"first": first, "second": second}
