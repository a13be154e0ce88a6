"""DP-FedBN with a trusted server: Li, He and Song 2023 (ADCOL), appendix on privacy; in the manner of McMahan et al.
2018, "Learning Differentially Private Recurrent Language Models".

    client:  Δ_i = w_i − w_t of everything but batch norm, L2-clipped to C;  sends w_t + Δ_i
    server:  w_{t+1} = w_t + Σ_i p_i Δ_i + N(0, (σ · 2C · max_i p_i)²) on each coordinate;  equal p_i by default

One party's data put in place of another's moves the mean by 2C · max p_i at most. σ is the least with which the rounds
that a party can be asked in keep to (ε, δ) together, by Rényi accounting. They are all rounds if everyone takes part,
else one in ⌊N/cohort⌋: parties are drawn without replacement until all have had a turn. That sampling hides who takes
part is not counted: the bound for it supposes that each party is drawn by itself, and cohorts here have a fixed size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import ClientData, Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.common.private_updates import PrivateUpdates
from rayfed.core.options import option
from rayfed.privacy.gaussian import check_budget, epsilon_spent, noise_multiplier
from rayfed.privacy.notes import SIMULATION_NOTE, large_delta_note


@dataclass(frozen=True, kw_only=True)
class GaussianDPFedBN(PrivateUpdates):
    """Sends clipped weights, gets noisy ones; keeps its batch norm. Scored: the common weights with the own batch norm.
    The clipping bound, the neighbours and the equal weights are ours."""

    name: ClassVar[str] = "gaussian_dp_fedbn"
    reference: ClassVar[str] = "Li, He and Song 2023, appendix B.12, DP-FedBN with a trusted server"

    delta: float = option(0.01, above=0, high=0.01, help="δ of all rounds together")
    uniform: bool = option(True, help="average with equal weights, which takes the least noise; else by examples")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        check_budget(self.epsilon, self.delta, problem.rounds)

    def sigma(self, ctx: Context) -> float:
        """The noise's standard deviation over what one party can move."""
        return noise_multiplier(self.epsilon, self.delta, rate=1.0, steps=self.turns(ctx, ctx.rounds))

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        turns = self.turns(ctx, ctx.rounds)
        noise = f"Gaussian noise of σ={self.sigma(ctx):.4g} times what a party can move, over its {turns} turns"
        said = f"ε={self.epsilon:g} at δ={self.delta:g} a party protects what the server sends; uploads are bare"
        return said, noise, *large_delta_note(self.delta, ctx.task.num_clients, "parties"), SIMULATION_NOTE

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        base = down["weights"]
        deltas = self.clipped(up["weights"], base, 2)
        return kept, up | {"weights": up["weights"] | {name: base[name] + delta for name, delta in deltas.items()}}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = super().aggregate(ctx, server, replies)
        weights = [self.weight(ctx, reply.examples) for reply in replies.each]
        std = self.sigma(ctx) * 2 * self.clip * max(weights) / sum(weights)
        found = server["weights"].items()
        noisy = {name: w + std * torch.randn_like(w) for name, w in found if w.is_floating_point()}
        return server | {"weights": server["weights"] | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return Privacy(epsilon_spent(self.sigma(ctx), self.delta, rate=1.0, steps=self.turns_so_far(ctx)), "client")
