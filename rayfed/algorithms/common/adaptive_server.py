"""What FedAdagrad, FedAdam and FedYogi share: a step along the mean update, scaled by how large updates have been.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ;   v ← each method's own;   w_{t+1} = w_t + η_s m / (√v + τ)

m starts from 0 and v from τ², the least that Alg. 2 of Reddi et al. 2021 allows; there is no bias correction. Alg. 2
prints Δ as an unweighted mean; here it is weighted by examples, as in FedAvg.
"""

from dataclasses import dataclass

import torch

from rayfed.algorithm import State
from rayfed.algorithms.common.server_optimizer import ServerOptimizer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, scale, tree_map


@dataclass(frozen=True, kw_only=True)
class AdaptiveServer(ServerOptimizer):
    server_lr: float = option(0.01, above=0, help="η_s, step of the server")
    beta1: float = option(0.9, low=0, below=1, help="β₁, decay of the mean update")
    tau: float = option(1e-3, above=0, help="τ, degree of adaptivity: small steps adapt, a large τ is momentum alone")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        """The next v, given v and Δ²."""
        raise NotImplementedError

    def moments(self, zeros: Weights) -> State:
        return {"first": zeros, "second": tree_map(lambda zero: torch.full_like(zero, self.tau**2), zeros)}

    def step_of(self, delta: Weights, state: State) -> tuple[Weights, State]:
        first = add(scale(state["first"], self.beta1), delta, alpha=1 - self.beta1)
        second = self.second_moment(state["second"], tree_map(torch.square, delta))
        step = tree_map(lambda m, v: self.server_lr * m / (v.sqrt() + self.tau), first, second)
        return step, {"first": first, "second": second}
