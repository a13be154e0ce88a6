"""DP-FedBN with a trusted server: Li, He and Song 2023, appendix on privacy, after McMahan et al.
2018, "Learning Differentially Private Recurrent Language Models".

    client:  Δ_i = w_i − w_t of everything but batch norm, clipped to an L2 norm of C;  sends w_t + Δ_i
             and integer buffers as they were received
    server:  w_{t+1} = w_t + 1/m · Σ_i s_i Δ_i + N(0, (σ · 2C/m)²) on each coordinate, over the m clients of a round
             s_i = 1, or with weighting=examples  s_i = min(n_i, B)/B  for a public bound B of a client's examples

Replacing the data of one client by those of another, of whatever number, moves the mean by at most 2C/m, since every
s_i lies in [0, 1] and the denominator is the same. This is the estimator with a fixed denominator of McMahan et al.;
weights n_i/Σn would change for all clients with the size of one. Clients of fewer than B examples move the model less.

σ is the least noise multiplier for which the rounds in which a client can take part satisfy (ε, δ) together, by Rényi
accounting. These are all rounds with full participation, else one in ⌊N/cohort⌋, since clients are sampled without
replacement until all have taken part. Amplification by sampling is not counted, since cohorts have a fixed size. The
clipping bound, this notion of neighbours and the equal weights are our choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.dp_fedbn import (
    clipped_update,
    max_participations,
    max_participations_so_far,
    refuse_unprotected_weights,
)
from rayfed.algorithms.fedbn import FedBN
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.privacy import SIMULATION_NOTE, large_delta_note
from rayfed.privacy.gaussian import check_budget, epsilon_spent, noise_multiplier


@dataclass(frozen=True, kw_only=True)
class GaussianDPFedBN(FedBN):
    name: ClassVar[str] = "gaussian_dp_fedbn"
    reference: ClassVar[str] = "Li, He and Song 2023, appendix B.12, DP-FedBN with a trusted server"
    sample_without_replacement: ClassVar[bool] = True
    depends_on_rounds: ClassVar[bool] = True

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, per client")
    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    clip: float = option(1.0, above=0, help="C, bound of the L2 norm of an update")
    weighting: str = weighting_option("equal", "; of examples, at most max_examples count")
    max_examples: int | None = option(None, low=1, help="B; needed with weighting=examples")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_unprotected_weights(problem, self)
        if self.weighting == "examples" and self.max_examples is None:
            raise UsageError(
                "algorithm.weighting=examples: the size of one client would change the weights of all, which ε does "
                "not cover; give algorithm.max_examples, a public bound of a client's examples, or use weighting=equal"
            )
        check_budget(self.epsilon, self.delta, problem.rounds)

    def sigma(self, ctx: Context) -> float:
        """Return the noise multiplier: the noise's standard deviation over the most that one client can change."""
        return noise_multiplier(self.epsilon, self.delta, rate=1.0, steps=max_participations(ctx, ctx.rounds))

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        times = max_participations(ctx, ctx.rounds)
        return (
            f"ε={self.epsilon:g} at δ={self.delta:g} per client protects what the server sends; uploads are not "
            "protected",
            f"Gaussian noise of σ={self.sigma(ctx):.4g} times the most that a client can change, for {times} "
            "participations",
            *large_delta_note(self.delta, ctx.task.num_clients, "clients"),
            SIMULATION_NOTE,
        )

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        base = down["weights"]
        deltas = clipped_update(up["weights"], base, bound=self.clip, order=2)
        return client, up | {"weights": base | {name: base[name] + delta for name, delta in deltas.items()}}

    def weight(self, ctx: Context, examples: int) -> float:
        """Return s_i."""
        return 1.0 if self.max_examples is None else min(examples, self.max_examples) / self.max_examples

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        before, mean = server["weights"], super().aggregate(ctx, server, replies)["weights"]
        count = len(replies.each)
        share = sum(self.weight(ctx, reply.examples) for reply in replies.each) / count  # 1/m Σ s_i, 1 if equal
        std = self.sigma(ctx) * 2 * self.clip / count
        noisy = {
            name: (value if share == 1 else before[name].lerp(value, share)) + std * _noise(value)
            for name, value in mean.items()
            if value.is_floating_point()
        }
        return server | {"weights": mean | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        steps = max_participations_so_far(ctx)
        return Privacy(epsilon_spent(self.sigma(ctx), self.delta, rate=1.0, steps=steps), "client")


def _noise(value: Tensor) -> Tensor:
    """Draw standard normal noise for `value`, on the CPU, so that it does not depend on where the server is."""
    return torch.randn_like(value, device="cpu").to(value.device)
