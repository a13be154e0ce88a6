"""FedAvgM: Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", section 3.2 (FedAvg with server momentum).

    Δ = Σ p_i w_i − w_t;   v ← β v + Δ;   w_{t+1} = w_t + η_s v      with Nesterov momentum: w_t + η_s (β v + Δ)
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, only, scale, sub, zeros_like


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(FedAvg):
    """FedAvg with an optimiser step on the server, which takes the clients' mean update Δ as a negative gradient.

    The step applies to the weights that are trained and sent; batch-norm statistics are averaged.
    """

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


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    """The server keeps the momentum of its updates."""

    name: ClassVar[str] = "fedavgm"
    reference: ClassVar[str] = "Hsu, Qi and Brown 2019, section 3.2"

    momentum: float = option(0.9, low=0, below=1, help="β, server momentum")
    server_lr: float = option(1.0, above=0, help="η_s, server learning rate")
    nesterov: bool = option(False, help="use Nesterov momentum")

    def moments(self, zeros: Weights) -> State:
        return {"momentum": zeros}

    def update(self, delta: Weights, moments: State) -> tuple[Weights, State]:
        velocity = add(delta, moments["momentum"], alpha=self.momentum)
        step = add(delta, velocity, alpha=self.momentum) if self.nesterov else velocity
        return scale(step, self.server_lr), {"momentum": velocity}
