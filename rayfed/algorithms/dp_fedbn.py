"""DP-FedBN, private baselines of ADCOL: Li, He and Song 2023. In table 17 the server is curious, and the clients add
Laplace noise. In appendix B.12 it is trusted and adds Gaussian noise, after McMahan et al. 2018, "Learning
Differentially Private Recurrent Language Models". The update Δ_i is w_i − w_t without batch norm.

    dp_fedbn:           client:  Δ_i clipped to an L1 norm of C;  sends w_t + Δ_i + Lap(2C/ε_round) on each coordinate
                        server:  FedBN, with equal weights unless weighting=examples
    gaussian_dp_fedbn:  client:  Δ_i clipped to an L2 norm of C;  sends w_t + Δ_i
                        server:  w_{t+1} = w_t + 1/m · Σ_i Δ_i + N(0, (σ · 2C/m)²) on each coordinate, over the m
                                 clients of a round

Integer buffers are sent as they were received. The budget covers the rounds in which a client can take part. With full
participation these are all rounds. Otherwise they are one in ⌊N/cohort⌋, since clients are sampled without replacement
until all have taken part. The paper's second variant samples a fifth of them per round. The clipping bound and the
weights are not in the paper.

Laplace: two clipped updates are at most 2C apart in L1, so a round spends ε_round for a client's whole update; ε is
split evenly over the rounds. Equal weights are the default because ε covers what a client sends, and its number of
examples would be sent beside it.

Gaussian: replacing the data of one client by those of another, of whatever number, moves the mean by at most 2C/m.
Weights n_i/Σn would change for all clients with the size of one. The noise multiplier σ is the least with which the
rounds together satisfy (ε, δ), by Rényi accounting. Amplification by sampling is not counted, since cohorts have a
fixed size. This notion of neighbours is our choice.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.fedbn import FedBN
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights, without
from rayfed.privacy import (
    SIMULATION_NOTE,
    check_budget,
    epsilon_spent,
    laplace_like,
    large_delta_note,
    noise_multiplier,
)


def clipped_update(sent: Weights, base: Weights, *, bound: float, order: int) -> Weights:
    """Return sent − base for floating-point weights, scaled down to an L1 (`order` 1) or L2 norm of at most `bound`."""
    deltas = {}
    for name, value in sent.items():
        if value.is_floating_point():
            deltas[name] = value - base[name]
    vector = torch.cat([delta.flatten() for delta in deltas.values()])
    norm = vector.norm(order, dtype=torch.float64)  # float32 loses a tenth of the L1 norm of 37 million numbers
    factor = (bound / norm).clamp(max=1)
    return {name: factor * delta for name, delta in deltas.items()}


def max_participations(ctx: Context, rounds: int) -> int:
    """Return how often a client takes part in the first `rounds` rounds at most, drawn without replacement."""
    cohorts = max(1, ctx.task.num_clients // len(ctx.cohort))  # 1: a cohort of unseen clients may exceed N
    return math.ceil(rounds / cohorts)


def max_participations_so_far(ctx: Context) -> int:
    """Return `max_participations` of the rounds until now; those of the final stage do not count."""
    return max_participations(ctx, min(ctx.round, ctx.rounds))


@dataclass(frozen=True, kw_only=True)
class ClippedFedBN(FedBN):
    """The part that both forms share: what clients send is their clipped update of the weights."""

    traits = replace(FedBN.traits, sample_without_replacement=True, depends_on_rounds=True)
    order: ClassVar[int]

    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, per client")
    clip: float = option(1.0, above=0, help="C, bound of the norm of an update: L1, or L2 in gaussian_dp_fedbn")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        sent = without(problem.task.initial_weights(), self.personal(problem.task))
        for name, value in sent.items():
            if value.is_complex() or not value.isfinite().all():
                raise UsageError(
                    f"model.name: algorithm.name={self.name} clips and adds noise to real, finite weights only, and "
                    f"{name!r} is complex or not finite; keep real weights, or register it with persistent=False"
                )

    def protect(self, ctx: Context, sent: Tensor) -> Tensor:
        """Return what a client sends in place of `sent`, its clipped weights of one name."""
        return sent

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        client, up = super().finish(ctx, work, client, down, data)
        sent = dict(down["weights"])
        deltas = clipped_update(up["weights"], down["weights"], bound=self.clip, order=self.order)
        for name, delta in deltas.items():
            sent[name] = self.protect(ctx, sent[name] + delta)
        up["weights"] = sent
        return client, up


@dataclass(frozen=True, kw_only=True)
class DPFedBN(ClippedFedBN):
    name = "dp_fedbn"
    reference = "Li, He and Song 2023, table 17, baseline DP-FedBN"
    order: ClassVar[int] = 1

    weighting: str = weighting_option("equal", "; ε does not cover the numbers of examples")

    def epsilon_per_round(self, ctx: Context) -> float:
        return self.epsilon / max_participations(ctx, ctx.rounds)

    def noise_scale(self, ctx: Context) -> float:
        return 2 * self.clip / self.epsilon_per_round(ctx)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        epsilon = self.epsilon_per_round(ctx)
        scale = self.noise_scale(ctx)
        notes = [
            f"ε={self.epsilon:g} per client, {epsilon:.4g} per participation: Laplace noise of scale {scale:.4g} on "
            "every weight"
        ]
        if self.weighting == "examples":
            notes.append(
                "the numbers of examples are sent in clear, for the weights of the mean: ε does not cover them"
            )
        notes.append(SIMULATION_NOTE)
        return notes

    def protect(self, ctx: Context, sent: Tensor) -> Tensor:
        return sent + laplace_like(sent, self.noise_scale(ctx))

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        times = max_participations_so_far(ctx)
        return Privacy(self.epsilon_per_round(ctx) * times, "client")


@dataclass(frozen=True, kw_only=True)
class GaussianDPFedBN(ClippedFedBN):
    name = "gaussian_dp_fedbn"
    reference = "Li, He and Song 2023, appendix B.12, DP-FedBN with a trusted server"
    order: ClassVar[int] = 2

    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    weighting: str = option("equal", choices=("equal",), help="ε would not cover the numbers of examples")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_budget(self.epsilon, self.delta, problem.rounds)

    def sigma(self, ctx: Context) -> float:
        """Return the noise multiplier: the noise's standard deviation over the most that one client can change."""
        steps = max_participations(ctx, ctx.rounds)
        return noise_multiplier(self.epsilon, self.delta, rate=1.0, steps=steps)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        times = max_participations(ctx, ctx.rounds)
        sigma = self.sigma(ctx)
        return (
            f"ε={self.epsilon:g} at δ={self.delta:g} per client protects what the server sends; uploads are not "
            "protected",
            f"Gaussian noise of σ={sigma:.4g} times the most that a client can change, for {times} participations",
            *large_delta_note(self.delta, ctx.task.num_clients, "clients"),
            SIMULATION_NOTE,
        )

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        weights = dict(super().aggregate(ctx, server, replies)["weights"])
        clients = len(replies.each)
        std = self.sigma(ctx) * 2 * self.clip / clients
        for name, mean in weights.items():
            if mean.is_floating_point():
                # drawn on the CPU, so that noise does not depend on where the server is
                noise = torch.randn_like(mean, device="cpu").to(mean.device)
                weights[name] = mean + std * noise
        return server | {"weights": weights}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        steps = max_participations_so_far(ctx)
        epsilon = epsilon_spent(self.sigma(ctx), self.delta, rate=1.0, steps=steps)
        return Privacy(epsilon, "client")
