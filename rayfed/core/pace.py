"""How long the rounds that are left will take, from those that are done."""

import statistics
from collections import deque

_LONG = 20.0  # seconds of a first round from which on its warming up hardly counts
_ROUNDS = 50  # the last rounds count, so that the estimate follows a machine that has become busy


class Pace:
    """Estimates the time left from the median time of a round, and of one after which models are scored.

    A median is not moved by a checkpoint that took long, or by a process that was replaced. The first round of each
    kind is left out as soon as there is a second one, because it includes warming up.

    Args:
        rounds: The number of rounds.
        every: Rounds between scores; the last round is scored in any case.
    """

    def __init__(self, rounds: int, every: int = 1):
        self.rounds, self.every = rounds, max(1, every)
        self._seconds: dict[bool, deque[float]] = {kind: deque(maxlen=_ROUNDS) for kind in (False, True)}
        self._warm: set[bool] = set()

    def add(self, round: int, seconds: float) -> None:
        """Take the wall-clock seconds of a round, everything after the round before included."""
        kind = self._is_scored(round)
        if len(self._seconds[kind]) == 1 and kind not in self._warm:
            self._seconds[kind].clear()
            self._warm.add(kind)
        self._seconds[kind].append(seconds)

    def left(self, round: int) -> float | None:
        """Return the seconds that the rounds after `round` take, or None before the second, unless they are long."""
        medians = {kind: statistics.median(seconds) for kind, seconds in self._seconds.items() if seconds}
        if not medians:
            return None
        last = self.rounds
        if round >= last:
            return 0.0
        if not self._warm and sum(map(len, self._seconds.values())) == 1 and max(medians.values()) < _LONG:
            return None
        scored = last // self.every - round // self.every + (last % self.every != 0)  # counted, since a run may be long
        plain = last - round - scored
        slower, faster = max(medians.values()), min(medians.values())
        return scored * medians.get(True, slower) + plain * medians.get(False, faster)

    def _is_scored(self, round: int) -> bool:
        return round % self.every == 0 or round >= self.rounds
