"""Schedules of learning rates over the rounds, as those of `torch.optim.lr_scheduler` with one step per round."""

import math
from dataclasses import dataclass

SCHEDULES = ("constant", "exponential", "step", "cosine")


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """The factor s(r) by which learning rates are multiplied in round r = 1, 2, …

    The first W = `warmup` rounds have s(r) = r/W. After them, with t = r − W − 1 = 0, 1, … and T rounds left:

        constant      s = 1
        exponential   s = γ^t
        step          s = γ^⌊t/`every`⌋
        cosine        s = `floor` + (1 − `floor`) (1 + cos(πt/T)) / 2

    Attributes:
        kind: One of `SCHEDULES`.
        decay: γ, the factor per round (exponential) or per drop (step).
        every: The rounds between drops (step).
        floor: The share of the rate towards which the cosine falls.
        warmup: The rounds of linear warm-up.
    """

    kind: str = "constant"
    decay: float = 1.0
    every: int = 1
    floor: float = 0.0
    warmup: int = 0

    @property
    def is_constant(self) -> bool:
        """Whether the factor is 1 in every round."""
        return self.kind == "constant" and not self.warmup

    @property
    def depends_on_rounds(self) -> bool:
        """Whether the factors of the first rounds depend on how many follow."""
        return self.kind == "cosine"

    def factor(self, round: int, rounds: int) -> float:
        """Return s(`round`) of a run with `rounds` rounds; 1 outside of them."""
        if not 1 <= round <= rounds:
            return 1.0
        if round <= self.warmup:
            return round / self.warmup
        t = round - self.warmup - 1
        if self.kind == "exponential":
            return self.decay**t
        if self.kind == "step":
            return self.decay ** (t // self.every)
        if self.kind == "cosine":
            return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * t / (rounds - self.warmup))) / 2
        return 1.0


CONSTANT = LrSchedule()
