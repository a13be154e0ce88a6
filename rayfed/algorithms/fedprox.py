"""FedProx: Li et al. 2020, "Federated Optimization in Heterogeneous Networks", Alg. 2.

    client:  min over w of  f_i(w) + (μ/2)‖w − w_t‖²,  w_t the weights received:  g ← ∇f_i(w) + μ (w − w_t)
    server:  FedAvg

The optimiser receives the sum, so that momentum and Adam's moments contain both parts. With momentum this is also the
rule of de Luca et al. 2022, who add μ(w − w_t) to the momentum buffer in place. The reported loss is f_i alone.
"""

from dataclasses import dataclass

from rayfed.algorithm import Context, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, only, sub


def pulled(grads: Weights, weights: Weights, anchor: Weights, mu: float) -> Weights:
    """Return grads + mu (weights − anchor) for the names in `anchor`, so that personal weights are not pulled."""
    sent = only(grads, anchor)
    distance = sub(only(weights, sent), only(anchor, sent))
    return grads | add(sent, distance, alpha=mu)


@dataclass(frozen=True, kw_only=True)
class FedProx(FedAvg):
    name = "fedprox"
    reference = "Li et al. 2020, Alg. 2"

    mu: float = option(
        0.01, low=0, help="μ, weight of the proximal term; 0 is FedAvg", elsewhere={"authors": "0", "PFLlib": "0"}
    )

    bytes_formula = FedAvg.bytes_formula

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        return pulled(grads, work["weights"], down["weights"], self.mu)
