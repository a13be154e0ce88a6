"""DP-FedBN, the private baseline of ADCOL: Li, He and Song 2023, honest-but-curious server, table 17.

    client:  Δ = w_i − w_t of everything but batch norm, L1-clipped to C;  sends w_t + Δ + Lap(2C/ε_round) on each
             coordinate
    server:  FedBN

Two clipped updates are at most 2C apart in L1, so a round spends ε_round for a party's whole update. The budget ε is
split over the rounds that a party can be asked in: all of them if everyone takes part, else one in ⌊N/cohort⌋, since
parties are drawn without replacement until all have had a turn (the paper's second way: a fifth of them a round).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from rayfed.algorithm import ClientData, Context, State
from rayfed.algorithms.fedbn import FedBN
from rayfed.options import option
from rayfed.privacy.laplace import laplace_like


@dataclass(frozen=True, kw_only=True)
class DPFedBN(FedBN):
    """Sends clipped and noisy weights; keeps its batch norm. Scored: the common weights with the own batch norm. The
    clipping bound is not in the paper."""

    name: ClassVar[str] = "dp_fedbn"
    source: ClassVar[str] = "Li, He and Song 2023, table 17, baseline DP-FedBN"
    takes_turns: ClassVar[bool] = True

    epsilon: float = option(5.0, above=0, help="ε of all rounds together, for a party")
    clip: float = option(1.0, above=0, help="C, bound of an update's L1 norm")

    def turns(self, ctx: Context, rounds: int) -> int:
        """In how many of the first `rounds` rounds a party is asked at most."""
        return math.ceil(rounds / (ctx.task.num_clients // len(ctx.cohort)))

    def share(self, ctx: Context) -> float:
        """ε_round."""
        return self.epsilon / self.turns(ctx, ctx.rounds)

    def remarks(self, ctx: Context) -> Sequence[str]:
        share = self.share(ctx)
        scale = 2 * self.clip / share
        return (f"ε={self.epsilon:g} a party, {share:.4g} a turn: Laplace noise of scale {scale:.4g} on every weight",)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        sent, base = up["weights"], down["weights"]
        deltas = {name: sent[name] - base[name] for name in sent if sent[name].is_floating_point()}
        norm = torch.stack([delta.abs().sum() for delta in deltas.values()]).sum()
        factor, scale = (self.clip / norm).clamp(max=1), 2 * self.clip / self.share(ctx)
        noisy = {name: base[name] + factor * d + laplace_like(d, scale) for name, d in deltas.items()}
        return kept, up | {"weights": sent | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> float | None:
        return self.share(ctx) * self.turns(ctx, min(ctx.round, ctx.rounds))
