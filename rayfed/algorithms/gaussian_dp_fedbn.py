"""DP-FedBN with a trusted server: Li, He and Song 2023 (ADCOL), appendix on privacy, after McMahan et al. 2018,
"Learning Differentially Private Recurrent Language Models".

    client:  Δ_i = w_i − w_t of everything but batch norm, clipped to an L2 norm of C;  sends w_t + Δ_i
    server:  w_{t+1} = w_t + Σ_i p_i Δ_i + N(0, (σ · 2C · max_i p_i)²) on each coordinate;  equal p_i by default

Replacing the data of one client by those of another moves the mean by at most 2C · max p_i. σ is the least noise
multiplier for which the rounds in which a client can take part satisfy (ε, δ) together, by Rényi accounting. These are
all rounds with full participation, else one in ⌊N/cohort⌋, since clients are sampled without replacement until all have
taken part. Amplification by sampling is not counted: its bound assumes that each client is sampled independently, and
cohorts here have a fixed size. The clipping bound, this notion of neighbours and the equal weights are our choices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import ClientData, Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.common.clipped_updates import clipped_update, max_participations, max_participations_so_far
from rayfed.algorithms.fedbn import FedBN
from rayfed.core.options import option
from rayfed.privacy.gaussian import check_budget, epsilon_spent, noise_multiplier
from rayfed.privacy.notes import SIMULATION_NOTE, large_delta_note


@dataclass(frozen=True, kw_only=True)
class GaussianDPFedBN(FedBN):
    """Clients send clipped weights, receive their mean with noise, and keep their batch-norm layers. A client is scored
    with the shared weights and its own batch norm."""

    name: ClassVar[str] = "gaussian_dp_fedbn"
    reference: ClassVar[str] = "Li, He and Song 2023, appendix B.12, DP-FedBN with a trusted server"
    sample_without_replacement: ClassVar[bool] = True

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, per client")
    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    clip: float = option(1.0, above=0, help="C, bound of the L2 norm of an update")
    uniform: bool = option(True, help="average with equal weights, which need the least noise; else by examples")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
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
        return client, up | {"weights": up["weights"] | {name: base[name] + delta for name, delta in deltas.items()}}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = super().aggregate(ctx, server, replies)
        weights = [self.weight(ctx, reply.examples) for reply in replies.each]
        std = self.sigma(ctx) * 2 * self.clip * max(weights) / sum(weights)
        noisy = {
            name: value + std * torch.randn_like(value)
            for name, value in server["weights"].items()
            if value.is_floating_point()
        }
        return server | {"weights": server["weights"] | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        steps = max_participations_so_far(ctx)
        return Privacy(epsilon_spent(self.sigma(ctx), self.delta, rate=1.0, steps=steps), "client")
