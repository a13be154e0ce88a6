"""VM, variance minimisation: de Luca et al. 2022, "Mitigating Data Heterogeneity in Federated Learning with Data
Augmentation", Eq. 22 to 24 (V-REx of Krueger et al. 2021 in federated form).

    min over θ of Σ p_i f_i(θ) + β Var_p(f),  p_i = n_i/N
    client:  trains from θ_t to θ^(i); sends θ^(i) and f_i(θ^(i)) over its training set, augmented where training is
    server:  θ_{t+1} = Σ w_i θ^(i),  w_i = p_i (1 + 2β (f_i − f̄)),  f̄ = Σ p_i f_i

That is Eq. 24 with p_i for 1/n: Σ p_i (f_i − f̄) = 0 turns the step θ_t − Δ into a weighted mean of models. Alg. 2 as
printed has 1/n as well as p_i, which shrinks the step n times. The authors' code uses w_i = 1/n + 2β (f_i − f̄) with
plain means, an n times larger β (`variant=code`). Where to take f_i is not said; at θ_t it diverges for β = 10, so it
is taken, as in their code, at θ^(i).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import ClientData, Context, Reply, State, mean_loss
from rayfed.algorithms.common.loss_weighted import LossWeighted, reported
from rayfed.core.errors import Diverged
from rayfed.core.options import option

LARGEST = 5.0  # the paper's settings stay below 1; past this, rounds amplify each other's error


def variance_weights(losses: Tensor, shares: Tensor, beta: float, variant: str) -> Tensor:
    """The clients' weights [n], which sum to 1 and may be negative."""
    if variant == "code":
        return 1 / len(losses) + 2 * beta * (losses - losses.mean())
    return shares * (1 + 2 * beta * (losses - (shares * losses).sum()))


@dataclass(frozen=True, kw_only=True)
class VM(LossWeighted):
    name: ClassVar[str] = "vm"
    reference: ClassVar[str] = "de Luca et al. 2022, Eq. 22 to 24 and Alg. 2"

    beta: float = option(10.0, low=0, help="β, weight of the variance of the losses: 10 Rotated MNIST, 0.5 PACS")
    variant: str = option("paper", choices=("paper", "code"), help="weights by Eq. 24, or as in the authors' code")

    @property
    def extrapolates(self) -> bool:
        return True

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        found = variance_weights(*reported(replies), self.beta, self.variant).tolist()
        for reply, weight in zip(replies, found, strict=True):
            if not abs(weight) <= LARGEST:
                raise Diverged(
                    f"round {ctx.round}, client {reply.client}: VM's weight is {weight:.3g}, beyond ±{LARGEST:g}; the "
                    f"clients' losses are too far apart for algorithm.beta={self.beta:g}, use a smaller one"
                )
        return found

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept, up | {"loss": mean_loss(ctx, work["weights"], data.as_trained)}
