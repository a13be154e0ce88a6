"""VM, variance minimisation: de Luca et al. 2022 (Gen-AFL), Eq. 22 to 24 (V-REx of Krueger et al. 2021 in federated
form).

    min over θ of Σ p_i f_i(θ) + β Var_p(f),  p_i = n_i/N
    client:  trains from θ_t to θ^(i); sends θ^(i) and f_i(θ^(i)) over its augmented training set
    server:  θ_{t+1} = Σ w_i θ^(i),  w_i = p_i (1 + 2β (f_i − f̄)),  f̄ = Σ p_i f_i

This is Eq. 24 with p_i in place of 1/n: since Σ p_i (f_i − f̄) = 0, the step θ_t − Δ is a weighted mean of models.
Alg. 2 as printed has both 1/n and p_i, which makes the step n times smaller. The authors' code uses
w_i = 1/n + 2β (f_i − f̄) with plain means, an n times larger β (`variant=code`). The paper does not say where f_i is
evaluated. At θ_t training diverges for β = 10, so it is evaluated at θ^(i), as in their code.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, Reply, State, mean_loss
from rayfed.algorithms.common.client_weights import (
    NEEDS_ALL_LOSSES,
    refuse_averaged_variances,
    refuse_sampling,
    reported_losses,
)
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import Diverged
from rayfed.core.options import option

LARGEST_WEIGHT = 5.0  # the paper's runs stay below 1; beyond this value, rounds amplify each other's error


def variance_weights(losses: Tensor, shares: Tensor, beta: float, variant: str) -> Tensor:
    """Return the clients' weights [n], which sum to 1 and may be negative."""
    if variant == "code":
        return 1 / len(losses) + 2 * beta * (losses - losses.mean())
    return shares * (1 + 2 * beta * (losses - (shares * losses).sum()))


@dataclass(frozen=True, kw_only=True)
class VM(FedAvg):
    name: ClassVar[str] = "vm"
    reference: ClassVar[str] = "de Luca et al. 2022, Eq. 22 to 24 and Alg. 2"

    beta: float = option(10.0, low=0, help="β, weight of the losses' variance; paper: 10 on Rotated MNIST, 0.5 on PACS")
    variant: str = option("paper", choices=("paper", "code"), help="weights by Eq. 24, or by the authors' code")

    def check(self, problem: ProblemSpec) -> None:
        refuse_sampling(problem, self.name, NEEDS_ALL_LOSSES)
        refuse_averaged_variances(problem, self.name, self.personal(problem.task))

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept, up | {"loss": mean_loss(ctx, work["weights"], data.as_trained)}

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        losses, shares = reported_losses(replies)
        weights: list[float] = variance_weights(losses, shares, self.beta, self.variant).tolist()
        for reply, weight in zip(replies, weights, strict=True):
            if not abs(weight) <= LARGEST_WEIGHT:
                raise Diverged(
                    f"round {ctx.round}, client {reply.client}: VM's weight is {weight:.3g}, beyond "
                    f"±{LARGEST_WEIGHT:g}; the clients' losses are too far apart for algorithm.beta={self.beta:g}, use "
                    "a smaller one"
                )
        return weights
