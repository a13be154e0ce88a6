"""Clients that drop out of a round, are late or do less work."""

import math
from dataclasses import dataclass

from rayfed.algorithm import Phase
from rayfed.core.ids import Moment
from rayfed.core.rng import generator


@dataclass(frozen=True, kw_only=True)
class Availability:
    """How much of the local work clients do in a round, and whether they reply.

    Attributes:
        least_work: For each round, each client draws the epochs (or steps) that it trains, uniformly between this share
            of the configured number, rounded up, and the configured number.
        dropout: The probability that a sampled client drops out of a round.
        deadline: The simulated seconds after which the server ignores replies; None if it waits for all.
    """

    least_work: float = 1.0
    dropout: float = 0.0
    deadline: float | None = None

    @property
    def loses_clients(self) -> bool:
        """Whether sampled clients may be missing from a round."""
        return bool(self.dropout) or self.deadline is not None

    def local_work(self, local: Phase, seed: int, moment: Moment, client: int) -> Phase:
        """Return the local training of a client in a round."""
        if self.least_work == 1 or moment.stage != "round":
            return local
        whole = local.steps if local.steps is not None else local.epochs or 1
        rng = generator(seed, "local work", round=moment.round, client=client)
        drawn = int(rng.integers(max(1, math.ceil(self.least_work * whole - 1e-9)), whole + 1))
        return local._replace(steps=drawn) if local.steps is not None else local._replace(epochs=drawn)

    def drops_out(self, seed: int, round: int, client: int) -> bool:
        """Return whether a sampled client drops out of a round."""
        return bool(self.dropout) and generator(seed, "dropout", round=round, client=client).random() < self.dropout


ALWAYS = Availability()
