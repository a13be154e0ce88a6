"""Optimisers on the server, which take the clients' mean update Δ = Σ p_i w_i − w_t as a negative gradient.

FedAvgM: Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", section 3.2.

    v ← β v + Δ;   w_{t+1} = w_t + η_s v      with Nesterov momentum: w_t + η_s (β v + Δ)

FedAdagrad, FedAdam and FedYogi: Reddi et al. 2021, "Adaptive Federated Optimization", Alg. 2.

    m ← β₁ m + (1−β₁) Δ;   w_{t+1} = w_t + η_s m / (√v + τ)
    FedAdagrad:  v ← v + Δ²
    FedAdam:     v ← β₂ v + (1−β₂) Δ²
    FedYogi:     v ← v − (1−β₂) Δ² sign(v − Δ²)

m starts from 0 and v from τ², the smallest value that Alg. 2 allows; there is no bias correction. Alg. 2 prints Δ as an
unweighted mean; here it is weighted by examples, as in FedAvg. Defaults are those of the paper; its experiments with
FedAdagrad have β₁ = 0. The authors' public trainer uses the Adam of Keras instead: v starts from 0, moments are
corrected, and β₂ is 0.999.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, only, scale, sub, tree_map, zeros_like


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(FedAvg):
    """FedAvg with an optimiser step on the weights that are trained and sent; batch-norm statistics are averaged."""

    def moments(self, zeros: Weights) -> State:
        """Return the optimiser's state before the first step; `zeros` has the structure of the weights."""
        raise NotImplementedError

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        """Return what to add to the weights for the mean update `delta`, and the optimiser's next state."""
        raise NotImplementedError

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        trained = only(server["weights"], ctx.task.trainable)
        server["optimizer"] = self.moments(zeros_like(trained))
        return server

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        mean = replies.mean["weights"]
        before = only(server["weights"], ctx.task.trainable)
        delta = sub(only(mean, before), before)
        step, moments = self.update(delta, server["optimizer"])
        return server | {"weights": mean | add(before, step), "optimizer": moments}


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    name = "fedavgm"
    reference = "Hsu, Qi and Brown 2019, section 3.2"

    momentum: float = option(0.9, low=0, below=1, help="β, server momentum")
    server_lr: float = option(1.0, above=0, help="η_s, server learning rate")
    nesterov: bool = option(False, help="use Nesterov momentum")

    def moments(self, zeros: Weights) -> State:
        return {"momentum": zeros}

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        velocity = add(delta, moments["momentum"], alpha=self.momentum)
        step = velocity
        if self.nesterov:
            step = add(delta, velocity, alpha=self.momentum)
        return scale(step, self.server_lr), {"momentum": velocity}


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
        def full(zero: Tensor) -> Tensor:
            return torch.full_like(zero, self.tau**2)

        return {"first": zeros, "second": tree_map(full, zeros)}

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        def step(m: Tensor, v: Tensor) -> Tensor:
            return self.server_lr * m / (v.sqrt() + self.tau)

        decayed = scale(moments["first"], self.beta1)
        first = add(decayed, delta, alpha=1 - self.beta1)
        squares = tree_map(torch.square, delta)
        second = self.second_moment(moments["second"], squares)
        return tree_map(step, first, second), {"first": first, "second": second}


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(AdaptiveServer):
    name = "fedadagrad"
    reference = "Reddi et al. 2021, Alg. 2 (FedAdagrad)"

    beta1: float = option(0.0, low=0, below=1, help="β₁, decay of the mean update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        return add(second, squares)


@dataclass(frozen=True, kw_only=True)
class FedAdam(AdaptiveServer):
    name = "fedadam"
    reference = "Reddi et al. 2021, Alg. 2 (FedAdam)"

    beta2: float = option(0.99, low=0, below=1, help="β₂, decay of the mean squared update")

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        decayed = scale(second, self.beta2)
        return add(decayed, squares, alpha=1 - self.beta2)


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    name = "fedyogi"
    reference = "Reddi et al. 2021, Alg. 2 (FedYogi)"

    def second_moment(self, second: Weights, squares: Weights) -> Weights:
        def moved(v: Tensor, square: Tensor) -> Tensor:
            sign = torch.sign(v - square)
            return v - (1 - self.beta2) * square * sign

        return tree_map(moved, second, squares)
