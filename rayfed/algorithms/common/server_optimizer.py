"""Server optimisers: methods in which the server treats the clients' mean update as a negative gradient.

    Δ = Σ p_i w_i − w_t;   w_{t+1} = w_t + step(Δ)

This applies to the weights that are trained and sent; batch-norm statistics are averaged.
"""

from dataclasses import dataclass

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import Weights, add, only, sub, zeros_like


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(FedAvg):
    """FedAvg with an optimiser step on the server."""

    def moments(self, zeros: Weights) -> State:
        """Return the optimiser's state before the first step; `zeros` has the structure of the weights."""
        raise NotImplementedError

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        """Return what to add to the weights for the mean update `delta`, and the optimiser's next state."""
        raise NotImplementedError

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"optimizer": self.moments(zeros_like(only(server["weights"], ctx.task.trainable)))}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        mean, before = replies.mean["weights"], only(server["weights"], ctx.task.trainable)
        step, moments = self.update(sub(only(mean, before), before), server["optimizer"])
        return server | {"weights": mean | add(before, step), "optimizer": moments}
