"""FedAvgM: Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", section 3.2 (FedAvg with server momentum).

    Δ = Σ p_i w_i − w_t;   v ← β v + Δ;   w_{t+1} = w_t + η_s v      with Nesterov momentum: w_t + η_s (β v + Δ)
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import State
from rayfed.algorithms.common.server_optimizer import ServerOptimizer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, scale


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
