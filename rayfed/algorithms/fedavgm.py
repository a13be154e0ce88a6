"""FedAvgM: Hsu, Qi and Brown 2019, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", section 3.2 (FedAvg with server momentum).

    Δ = Σ p_i w_i − w_t;   v ← β v + Δ;   w_{t+1} = w_t + η_s v      Nesterov's form: w_t + η_s (β v + Δ)
"""

from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import State
from rayfed.algorithms.common.server_optimizer import ServerOptimizer
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, scale


@dataclass(frozen=True, kw_only=True)
class FedAvgM(ServerOptimizer):
    """As FedAvg in what is sent, kept and scored; the server keeps the momentum of its updates."""

    name: ClassVar[str] = "fedavgm"
    reference: ClassVar[str] = "Hsu, Qi and Brown 2019, section 3.2"

    momentum: float = option(0.9, low=0, below=1, help="β, momentum of the server")
    server_lr: float = option(1.0, above=0, help="η_s, step along the momentum")
    nesterov: bool = option(False, help="Nesterov's form of the momentum")

    def step_of(self, delta: Weights, state: State) -> tuple[Weights, State]:
        velocity = add(delta, state["momentum"], alpha=self.momentum)
        step = add(delta, velocity, alpha=self.momentum) if self.nesterov else velocity
        return scale(step, self.server_lr), {"momentum": velocity}
