"""What FedAvgM, FedAdagrad, FedAdam and FedYogi share: the server takes the mean update for a negative gradient.

    Δ = Σ p_i w_i − w_t;   w_{t+1} = w_t + step(Δ)

This goes for what is trained and sent; batch-norm statistics are averaged.
"""

from dataclasses import dataclass

from rayfed.algorithm import Context, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import Weights, add, only, sub, zeros_like


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(FedAvg):
    def step_of(self, delta: Weights, state: State) -> tuple[Weights, State]:
        """(what to add to the weights, the optimiser's next state) for the mean update `delta`."""
        raise NotImplementedError

    def moments(self, zeros: Weights) -> State:
        """The optimiser's state before the first step, given zeros of the shape of what it steps."""
        return {"momentum": zeros}

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"optimizer": self.moments(zeros_like(only(server["weights"], ctx.task.trainable)))}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        mean, before = replies.mean["weights"], only(server["weights"], ctx.task.trainable)
        step, state = self.step_of(sub(only(mean, before), before), server["optimizer"])
        return server | {"weights": mean | add(before, step), "optimizer": state}
