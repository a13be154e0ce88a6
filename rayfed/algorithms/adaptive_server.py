"""FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    Δ = Σ p_i w_i − w_t;   m ← β₁ m + (1−β₁) Δ
    FedAdagrad:  v ← v + Δ²
    FedAdam:     v ← β₂ v + (1−β₂) Δ²
    FedYogi:     v ← v − (1−β₂) Δ² sign(v − Δ²)
    w_{t+1} = w_t + η_s m / (√v + τ)

m starts from 0 and v from τ², the smallest value that Alg. 2 allows; there is no bias correction. Alg. 2 prints Δ as an
unweighted mean; here it is weighted by examples, as in FedAvg. Defaults are those of the paper, whose experiments with
FedAdagrad have β₁ = 0. The authors' public trainer uses the Adam of Keras instead: v starts from 0, moments are
corrected, and β₂ is 0.999.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import State
from rayfed.algorithms.fedavgm import ServerOptimizer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, scale, tree_map


@dataclass(frozen=True, kw_only=True)
class AdaptiveServer(ServerOptimizer):
    """The part of Alg. 2 that the three methods share."""

    server_lr: float = option(0.01, above=0, help="η_s, server learning rate")
    beta1: float = option(0.9, low=0, below=1, help="β₁, decay of the mean update")
    tau: float = option(1e-3, above=0, help="τ; small values adapt, large ones give momentum only")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        """Return the next v for v and Δ²."""
        raise NotImplementedError

    def moments(self, zeros: Weights) -> State:
        return {"first": zeros, "second": tree_map(lambda zero: torch.full_like(zero, self.tau**2), zeros)}

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        first = add(scale(moments["first"], self.beta1), delta, alpha=1 - self.beta1)
        second = self.second_moment(moments["second"], tree_map(torch.square, delta))
        step = tree_map(lambda m, v: self.server_lr * m / (v.sqrt() + self.tau), first, second)
        return step, {"first": first, "second": second}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveServer):
    """The server keeps its mean update and the sum of squared updates."""

    name: ClassVar[str] = "fedadagrad"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedAdagrad)"

    beta1: float = option(0.0, low=0, below=1, help="β₁, decay of the mean update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(second, squares)


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveServer):
    """The server keeps two moments of its updates."""

    name: ClassVar[str] = "fedadam"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedAdam)"

    beta2: float = option(0.99, low=0, below=1, help="β₂, decay of the mean squared update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(scale(second, self.beta2), squares, alpha=1 - self.beta2)


@dataclass(frozen=True, kw_only=True)
class FedYogi(AdaptiveServer):
    """The server keeps two moments of its updates."""

    name: ClassVar[str] = "fedyogi"
    reference: ClassVar[str] = "Reddi et al. 2021, Alg. 2 (FedYogi)"

    beta2: float = option(0.99, low=0, below=1, help="β₂, decay of the mean squared update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return tree_map(lambda v, s: v - (1 - self.beta2) * s * torch.sign(v - s), second, squares)
