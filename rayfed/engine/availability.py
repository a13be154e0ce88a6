"""Clients that drop out of a round, are late or do less work, on a simulated clock."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rayfed.algorithm import Algorithm, Context, Phase
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.rng import generator
from rayfed.engine.training import steps_of


class Responding(NamedTuple):
    """A round's clients whose replies count, in ascending order, and the simulated seconds (None without a clock)."""

    clients: tuple[ClientIndex, ...]
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Availability:
    """How much of the local work clients do in a round, how long they take and whether they reply.

    Attributes:
        least_work: For each round, each client draws the epochs (or steps) that it trains, uniformly between this share
            of the configured number, rounded up, and the configured number.
        dropout: The probability that a sampled client drops out of a round.
        step_seconds: The simulated seconds of a local step of the median client; 0 without a clock.
        speed_spread: The standard deviation over clients of the logarithm of the seconds per step.
        deadline: The simulated seconds after which the server ignores replies; None if it waits for all.
    """

    least_work: float = 1.0
    dropout: float = 0.0
    step_seconds: float = 0.0
    speed_spread: float = 0.0
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

    def seconds_per_step(self, seed: int, client: int) -> float:
        """Return the simulated seconds of a local step of a client."""
        return self.step_seconds * math.exp(self.speed_spread * generator(seed, "speed", client=client).normal())

    def responding(
        self,
        algorithm: Algorithm,
        ctx: Context,
        cohort: Sequence[ClientIndex],
        examples: np.ndarray,
        *,
        seed: int,
        drop_last: bool,
    ) -> Responding:
        """Return which clients of the cohort of a round reply in time; at least the fastest client does.

        The server notices at once that a client has dropped out, and waits for the other clients until the deadline.

        Args:
            ctx: The context of the round.
            examples: The number of training examples of each client, int64 [clients].
        """
        if not self.loses_clients and not self.step_seconds:
            return Responding(tuple(cohort), None)
        seconds = dict.fromkeys(cohort, 0.0)
        if self.step_seconds:
            for client in cohort:
                local = self.local_work(ctx.local, seed, ctx.moment, client)
                at = ctx.at(client=client, examples=int(examples[client]), cohort=tuple(cohort), local=local)
                steps = sum(steps_of(exchange, at, drop_last=drop_last) for exchange in algorithm.round_exchanges)
                seconds[client] = steps * self.seconds_per_step(seed, client)
        limit = math.inf if self.deadline is None else self.deadline
        there = [client for client in cohort if not self._drops_out(seed, ctx.round, client)]
        in_time = [client for client in there if seconds[client] <= limit]
        replying = in_time or [min(there or cohort, key=lambda client: seconds[client])]
        waited = max(seconds[client] for client in replying)
        if in_time and len(in_time) < len(there):
            waited = limit
        return Responding(tuple(replying), waited if self.step_seconds else None)

    def _drops_out(self, seed: int, round: int, client: int) -> bool:
        return bool(self.dropout) and generator(seed, "dropout", round=round, client=client).random() < self.dropout


ALWAYS = Availability()
