"""Schedules of learning rates over the rounds, equal to `torch.optim.lr_scheduler` with one step per round."""

import math
from dataclasses import dataclass
from typing import ClassVar

from rayfed.core.options import option

SCHEDULES = {
    "constant": "rayfed.core.lr_schedule:LrSchedule",
    "exponential": "rayfed.core.lr_schedule:Exponential",
    "step": "rayfed.core.lr_schedule:Step",
    "cosine": "rayfed.core.lr_schedule:Cosine",
}


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """The same rate in all rounds, and the base class of all schedules.

    A schedule is the factor s(r) by which learning rates are multiplied in round r = 1, 2, and so on. The first
    W = `warmup` rounds have s(r) = r/W; `after_warmup` gives the factors after that.
    """

    depends_on_rounds: ClassVar[bool] = False
    """Whether the factors of the first rounds depend on how many follow."""

    warmup: int = option(0, low=0, help="rounds in which the rate first rises linearly; the schedule follows them")

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 in every round."""
        return type(self) is LrSchedule and not self.warmup

    def factor(self, round: int, rounds: int) -> float:
        """Return s(`round`) of a run with `rounds` rounds; 1 outside of them."""
        if not 1 <= round <= rounds:
            return 1.0
        if round <= self.warmup:
            return round / self.warmup
        return self.after_warmup(round - self.warmup - 1, rounds - self.warmup)

    def after_warmup(self, t: int, rounds: int) -> float:
        """Return the factor of round t = 0, 1, … of the `rounds` that follow the warm-up."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Exponential(LrSchedule):
    """The rate is multiplied by `decay` in every round: s = decay^t."""

    decay: float = option(above=0, high=1, help="factor per round, such as 0.99")

    def after_warmup(self, t: int, rounds: int) -> float:
        return self.decay**t


@dataclass(frozen=True, kw_only=True)
class Step(LrSchedule):
    """The rate is multiplied by `decay` after every `every` rounds: s = decay^⌊t/every⌋."""

    decay: float = option(above=0, high=1, help="factor per drop, such as 0.1")
    every: int = option(low=1, help="rounds between drops")

    def after_warmup(self, t: int, rounds: int) -> float:
        return self.decay ** (t // self.every)


@dataclass(frozen=True, kw_only=True)
class Cosine(LrSchedule):
    """The rate falls by a cosine over all rounds: s = floor + (1 − floor) (1 + cos(πt/T)) / 2."""

    depends_on_rounds: ClassVar[bool] = True

    floor: float = option(0.0, low=0, below=1, help="share of the rate towards which it falls")

    def after_warmup(self, t: int, rounds: int) -> float:
        cosine = math.cos(math.pi * t / rounds)
        return self.floor + (1 - self.floor) * (1 + cosine) / 2


CONSTANT = LrSchedule()
