"""DP-FedBN, ADCOL's private baseline for an honest but curious server: Li, He and Song 2023, table 17.

    client:  Δ = w_i − w_t of everything but batch norm, clipped to an L1 norm of C
             sends w_t + Δ + Lap(2C/ε_round) on each coordinate; integer buffers are sent as they were received
    server:  FedBN, with equal weights unless weighting=examples

Two clipped updates are at most 2C apart in L1, so a round spends ε_round for a client's whole update. The budget ε is
split over the rounds in which a client can take part. These are all rounds with full participation, else one in
⌊N/cohort⌋, since clients are sampled without replacement until all have taken part (the paper's second variant samples
a fifth of them per round). The clipping bound and the weights are not in the paper. Equal weights are the default
because ε covers what a client sends, and its number of examples would be sent beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import ClientData, Context, Privacy, ProblemSpec, State
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.fedbn import FedBN
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights, without
from rayfed.privacy import SIMULATION_NOTE
from rayfed.privacy.laplace import laplace_like


def clipped_update(sent: Weights, base: Weights, *, bound: float, order: int) -> Weights:
    """Return sent − base for floating-point weights, scaled down to an L1 (`order` 1) or L2 norm of at most `bound`."""
    deltas = {name: sent[name] - base[name] for name in sent if sent[name].is_floating_point()}
    vector = torch.cat([delta.flatten() for delta in deltas.values()])
    norm = vector.norm(order, dtype=torch.float64)  # float32 loses a tenth of the L1 norm of 37 million numbers
    factor = (bound / norm).clamp(max=1)
    return {name: factor * delta for name, delta in deltas.items()}


def refuse_unprotected_weights(problem: ProblemSpec, algorithm: FedBN) -> None:
    """Raise UsageError for weights that would be sent without clipping and noise, or whose update has no norm."""
    task = problem.task
    for name, value in without(task.initial_weights(), algorithm.personal(task)).items():
        if value.is_complex():
            raise UsageError(
                f"model.name: the weight {name!r} is complex, and algorithm.name={algorithm.name} clips and adds noise "
                "to real weights only; keep its real and its imaginary part as two weights"
            )
        if not value.isfinite().all():
            raise UsageError(
                f"model.name: the weight {name!r} is not finite, so algorithm.name={algorithm.name} cannot clip the "
                "norm of an update; register the buffer with persistent=False, or fill it with large finite numbers"
            )


def max_participations(ctx: Context, rounds: int) -> int:
    """Return how often a client takes part in the first `rounds` rounds at most, drawn without replacement."""
    cohorts = max(1, ctx.task.num_clients // len(ctx.cohort))  # 1: a cohort of unseen clients may exceed N
    return math.ceil(rounds / cohorts)


def max_participations_so_far(ctx: Context) -> int:
    """Return `max_participations` of the rounds until now; those of the final stage do not count."""
    return max_participations(ctx, min(ctx.round, ctx.rounds))


@dataclass(frozen=True, kw_only=True)
class DPFedBN(FedBN):
    name: ClassVar[str] = "dp_fedbn"
    reference: ClassVar[str] = "Li, He and Song 2023, table 17, baseline DP-FedBN"
    sample_without_replacement: ClassVar[bool] = True
    depends_on_rounds: ClassVar[bool] = True

    weighting: str = weighting_option("equal", "; ε does not cover the numbers of examples")
    epsilon: float = option(5.0, low=1e-6, help="ε of all rounds together, per client")
    clip: float = option(1.0, above=0, help="C, bound of the L1 norm of an update")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_unprotected_weights(problem, self)

    def epsilon_per_round(self, ctx: Context) -> float:
        return self.epsilon / max_participations(ctx, ctx.rounds)

    def noise_scale(self, ctx: Context) -> float:
        return 2 * self.clip / self.epsilon_per_round(ctx)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        noise = (
            f"ε={self.epsilon:g} per client, {self.epsilon_per_round(ctx):.4g} per participation: Laplace noise of "
            f"scale {self.noise_scale(ctx):.4g} on every weight"
        )
        sizes = "the numbers of examples are sent in clear, for the weights of the mean: ε does not cover them"
        return (noise, SIMULATION_NOTE) if self.weighting == "equal" else (noise, sizes, SIMULATION_NOTE)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        client, up = super().finish(ctx, work, client, down, data)
        base, scale = down["weights"], self.noise_scale(ctx)
        deltas = clipped_update(up["weights"], base, bound=self.clip, order=1)
        noisy = {name: base[name] + delta + laplace_like(delta, scale) for name, delta in deltas.items()}
        return client, up | {"weights": base | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return Privacy(self.epsilon_per_round(ctx) * max_participations_so_far(ctx), "client")
