"""Central training whose penalty begins with a small β; the optimiser starts anew when it grows, as in DomainBed."""

from dataclasses import dataclass

from rayfed.algorithm import Context
from rayfed.algorithms.erm import ERM
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Annealed(ERM):
    beta: float = option(10.0, low=0, help="β after the first steps; 0 is ERM then")
    beta_start: float = option(1.0, low=0, help="β in the first steps")
    anneal: int = option(500, low=0, help="steps before β changes and the optimiser starts anew")

    def beta_now(self, ctx: Context) -> float:
        return self.beta if ctx.round > self.anneal else self.beta_start

    def renews(self, ctx: Context) -> bool:
        return ctx.round == self.anneal + 1
