"""DP-FedBN, the private baseline of ADCOL: Li, He and Song 2023, honest-but-curious server, table 17.

    client:  Δ = w_i − w_t of everything but batch norm, L1-clipped to C;  sends w_t + Δ + Lap(2C/ε_round) on each
             coordinate
    server:  FedBN

Two clipped updates are at most 2C apart in L1, so a round spends ε_round for a party's whole update. The budget ε is
split over the rounds that a party can be asked in: all of them if everyone takes part, else one in ⌊N/cohort⌋, since
parties are drawn without replacement until all have had a turn (the paper's second way: a fifth of them a round).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from rayfed.algorithm import ClientData, Context, Privacy, ProblemSpec, State
from rayfed.algorithms.common.private_updates import PrivateUpdates
from rayfed.privacy.laplace import laplace_like
from rayfed.privacy.notes import SIMULATION_NOTE


@dataclass(frozen=True, kw_only=True)
class DPFedBN(PrivateUpdates):
    """Sends clipped and noisy weights; keeps its batch norm. Scored: the common weights with the own batch norm. The
    clipping bound is not in the paper."""

    name: ClassVar[str] = "dp_fedbn"
    reference: ClassVar[str] = "Li, He and Song 2023, table 17, baseline DP-FedBN"

    def share(self, ctx: Context) -> float:
        """ε_round."""
        return self.epsilon / self.turns(ctx, ctx.rounds)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        share = self.share(ctx)
        scale = 2 * self.clip / share
        noise = f"ε={self.epsilon:g} a party, {share:.4g} a turn: Laplace noise of scale {scale:.4g} on every weight"
        return noise, SIMULATION_NOTE

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        base, scale = down["weights"], 2 * self.clip / self.share(ctx)
        deltas = self.clipped(up["weights"], base, 1)
        noisy = {name: base[name] + delta + laplace_like(delta, scale) for name, delta in deltas.items()}
        return kept, up | {"weights": up["weights"] | noisy}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return Privacy(self.share(ctx) * self.turns_so_far(ctx), "client")
