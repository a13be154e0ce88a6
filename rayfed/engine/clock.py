"""The simulated clock and its clients: how fast they train and send, when they are there, and which drop out."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rayfed.algorithm import Phase
from rayfed.core.ids import Moment
from rayfed.core.rng import generator

_MOST_CYCLES = 10_000


class Device(NamedTuple):
    """The device of a client.

    Attributes:
        step_seconds: The seconds of a local step.
        up_mbps, down_mbps: Its bandwidths in 10⁶ bits per second; infinite where sending takes no time.
        available: The seconds from which and until which it is there, in ascending order; None: always.
    """

    step_seconds: float
    up_mbps: float = math.inf
    down_mbps: float = math.inf
    available: tuple[tuple[float, float], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Clock:
    """The clock of a simulation.

    Attributes:
        step_seconds: The seconds of a local step of the median client; 0 without a clock.
        speed_spread: The standard deviation over clients of the logarithm of what they draw: seconds per step, and both
            bandwidths.
        up_mbps, down_mbps: The bandwidths of the median client; None: sending takes no time.
        server_seconds: The seconds that the server takes for an update.
        profile: The devices of all clients, in place of drawn ones.
    """

    step_seconds: float = 0.0
    speed_spread: float = 0.0
    up_mbps: float | None = None
    down_mbps: float | None = None
    server_seconds: float = 0.0
    profile: tuple[Device, ...] = ()

    @property
    def runs(self) -> bool:
        """Whether clients take any time."""
        return bool(self.step_seconds or self.profile or self.sends)

    @cached_property
    def sends(self) -> bool:
        """Whether sending takes time."""
        drawn = self.up_mbps is not None or self.down_mbps is not None
        return drawn or any(math.isfinite(min(device.up_mbps, device.down_mbps)) for device in self.profile)

    @cached_property
    def _period(self) -> float:
        return max(device.available[-1][1] for device in self.profile if device.available)

    def device(self, seed: int, client: int) -> Device:
        """Return the device of a client, which it keeps."""
        if self.profile:
            return self.profile[client]

        def factor(purpose: str) -> float:
            return math.exp(self.speed_spread * generator(seed, purpose, client=client).normal())

        up = math.inf
        if self.up_mbps is not None:
            up = self.up_mbps * factor("up_mbps")
        down = math.inf
        if self.down_mbps is not None:
            down = self.down_mbps * factor("down_mbps")
        return Device(self.step_seconds * factor("speed"), up, down)

    def end(self, device: Device, start: float, steps: int, down: int, up: int) -> float:
        """Return when a client that starts at `start` has received `down` bytes, trained and sent `up` bytes.

        It pauses while it is away. The availability of all clients repeats after the last time of the profile. After
        `_MOST_CYCLES` of these cycles, the end is not exact: the client is taken to be there evenly in a cycle.
        """
        seconds = steps * device.step_seconds + 8e-6 * (down / device.down_mbps + up / device.up_mbps)
        if device.available is None:
            return start + seconds
        first = math.floor(start / self._period)
        for cycle in range(first, first + _MOST_CYCLES):
            for begins, ends in device.available:
                begins = max(begins + cycle * self._period, start)
                ends = ends + cycle * self._period
                if begins + seconds <= ends:
                    return begins + seconds
                seconds -= max(ends - begins, 0.0)
        of_a_cycle = sum(ends - begins for begins, ends in device.available)
        cycles = first + _MOST_CYCLES + seconds / of_a_cycle
        return cycles * self._period


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
        whole = local.epochs or 1
        if local.steps is not None:
            whole = local.steps
        least = max(1, math.ceil(self.least_work * whole - 1e-9))
        rng = generator(seed, "local work", round=moment.round, client=client)
        drawn = int(rng.integers(least, whole + 1))
        if local.steps is not None:
            return local._replace(steps=drawn)
        return local._replace(epochs=drawn)

    def drops_out(self, seed: int, round: int, client: int) -> bool:
        """Return whether a sampled client drops out of a round."""
        return bool(self.dropout) and generator(seed, "dropout", round=round, client=client).random() < self.dropout


NO_CLOCK = Clock()
ALWAYS = Availability()
