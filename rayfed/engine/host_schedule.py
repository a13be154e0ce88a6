"""Which host runs which clients: planned by predicted cost, and corrected while they run.

Work comes in units, such as a client to train. Units are dealt anew for every exchange, those with the highest
predicted cost first, each to the host that is going to be free first. Hosts are sent their units in chunks that become
smaller towards the end. Units that have not been sent yet can still move: an idle host takes the tail of the host that
is expected to finish last. Where and in which order clients run changes the time and no result.

Nothing here knows about processes. Times are arguments, so that a schedule can be simulated.
"""

import itertools
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rayfed.core.ids import ClientIndex

IN_FLIGHT = 2
"""Chunks that a host holds at most: the chunk that it works on, and the next, so that it need not wait."""
MOST_CLIENTS = 64
"""Clients of a chunk, by default."""
_LEAST_SHARE = 0.06  # the smallest chunk, as a share of the mean work of a host
_LEAST_SECONDS = 0.1  # the shortest chunk: below this, calls cost more than corrections gain


@dataclass(frozen=True)
class Unit:
    """Work that a host does in one go: clients, or test sets of the server.

    Attributes:
        cost: The predicted cost, in the same measure for all units of a schedule, such as training steps.
        home: The host that had the clients last. It gets them where others would take as long: it has their data.
    """

    clients: tuple[ClientIndex, ...] = ()
    tests: tuple[int, ...] = ()
    cost: float = 1.0
    home: int | None = None


def _cost(units: Iterable[Unit]) -> float:
    return sum(unit.cost for unit in units)


@dataclass(eq=False)
class Chunk:
    """Units that are sent to a host together.

    Attributes:
        predicted: The seconds that the host is predicted to take, or None where nothing has been measured.
        started: When the host began with it, as far as is known.
    """

    host: int
    units: Sequence[Unit]
    predicted: float | None
    started: float | None = None

    def elapsed(self, now: float) -> float:
        """Return the seconds since the host began with it."""
        if self.started is None:
            return 0.0
        return now - self.started

    @property
    def clients(self) -> list[ClientIndex]:
        """The clients of all units; units with fewer clients come last, so that blocks of one size are the units."""
        clients: list[ClientIndex] = []
        for unit in sorted(self.units, key=lambda unit: -len(unit.clients)):
            clients += unit.clients
        return clients

    @property
    def blocks(self) -> tuple[tuple[ClientIndex, ...], ...]:
        """The clients of each unit that has some."""
        return tuple(unit.clients for unit in self.units if unit.clients)

    @property
    def tests(self) -> list[int]:
        """The test sets of all units."""
        return list(itertools.chain(*(unit.tests for unit in self.units)))

    @property
    def cost(self) -> float:
        """The predicted cost of all units."""
        return _cost(self.units)


class Rates:
    """Running estimates of the seconds per unit of cost, by host and kind of work.

    An exchange counts half as much as the host's next exchange. Within an exchange, every unit of cost counts the same:
    a short chunk says little, because most of its seconds are those of the call.
    """

    def __init__(self) -> None:
        self._measured: dict[tuple[Hashable, int], tuple[float, float]] = {}  # seconds and cost
        self._before: set[tuple[Hashable, int]] = set()  # keys that were not measured in this exchange

    def begin(self, kind: Hashable) -> None:
        """Begin an exchange."""
        self._before.update(key for key in self._measured if key[0] == kind)

    def measured(self, kind: Hashable, host: int, cost: float, seconds: float) -> None:
        """Take a measurement into account."""
        if cost > 0 and seconds > 0:
            key = kind, host
            weight = 1.0
            if key in self._before:
                weight = 0.5
            self._before.discard(key)
            old_seconds, old_cost = self._measured.get(key, (0.0, 0.0))
            all_seconds = weight * old_seconds + seconds
            self._measured[key] = all_seconds, weight * old_cost + cost

    def of(self, kind: Hashable, hosts: Iterable[int]) -> dict[int, float] | None:
        """Return the seconds per unit of cost of each host, or None where nothing has been measured.

        A host that is new to this kind of work gets the mean.
        """
        known = {}
        for (of, host), (seconds, cost) in self._measured.items():
            if of == kind:
                known[host] = seconds / cost
        if not known:
            return None
        mean = sum(known.values()) / len(known)
        return {host: known.get(host, mean) for host in hosts}


@dataclass
class Schedule:
    """The schedule of an exchange, or of other work that hosts share.

    Args:
        units: The work; each unit is done once.
        free: The hosts that are free, by their position.
        rates: The seconds per unit of cost on each host; None where nothing has been measured.
        most_clients: The most clients of a chunk, whose states are in memory at once.
    """

    units: Sequence[Unit]
    free: Collection[int]
    rates: Mapping[int, float] | None = None
    most_clients: int = MOST_CLIENTS

    def __post_init__(self) -> None:
        self._plans: dict[int, deque[Unit]] = {host: deque() for host in self.free}
        self._flying: dict[int, list[Chunk]] = {host: [] for host in self.free}
        self._left = len(self.units)
        whole = _cost(self.units)
        self._least = _LEAST_SHARE * whole / max(1, len(self.free))
        seconds = dict.fromkeys(self.free, 0.0)
        largest_first = sorted(self.units, key=lambda unit: -unit.cost)
        for cost, units in itertools.groupby(largest_first, lambda unit: unit.cost):
            of_home: dict[int | None, deque[Unit]] = {}
            for unit in units:
                of_home.setdefault(unit.home, deque()).append(unit)
            while any(of_home.values()):  # to the host that is going to be free first
                ends = {}
                for host in self.free:
                    ends[host] = seconds[host] + cost * self._rate(host)
                best = min(ends, key=lambda host: (ends[host], not of_home.get(host), host))
                seconds[best] = ends[best]
                own = of_home.get(best) or max(of_home.values(), key=len)
                self._plans[best].append(own.popleft())
        self.predicted: dict[int, float] | None = None
        if self.rates is not None:
            self.predicted = {host: _cost(plan) * self._rate(host) for host, plan in self._plans.items()}

    @property
    def finished(self) -> bool:
        """Whether all units are done."""
        return not self._left

    @property
    def all_sent(self) -> bool:
        """Whether hosts have been sent all units."""
        return not any(self._plans.values())

    def next(self, host: int, now: float) -> Chunk | None:
        """Return what to send to `host` now, or None."""
        flying = self._flying[host]
        if len(flying) >= IN_FLIGHT:
            return None
        if not self._plans[host] and not flying:
            self._steal(host, now)
        if not self._plans[host]:
            return None
        chunk = Chunk(host, self._front(host), None)
        if self.rates is not None:
            chunk.predicted = chunk.cost * self._rate(host)
        if not flying:
            chunk.started = now
        flying.append(chunk)
        return chunk

    def done(self, chunk: Chunk, now: float) -> None:
        """Note that `chunk` is done."""
        flying = self._flying[chunk.host]
        flying.remove(chunk)
        if flying:
            flying[0].started = now
        self._left -= len(chunk.units)

    def _rate(self, host: int) -> float:
        if self.rates is None:
            return 1.0
        return self.rates[host]

    def _remaining(self, host: int, now: float) -> float:
        """Return the predicted seconds until `host` has done everything that it holds or is planned to do."""
        rate = self._rate(host)
        flying = self._flying[host]
        seconds = sum(chunk.cost * rate for chunk in flying)
        if flying:
            first = flying[0].cost * rate
            elapsed = flying[0].elapsed(now)
            # A chunk that is late is expected to take as long again as it took so far.
            left = max(first - elapsed, 0.0)
            if elapsed > 2 * first:
                left = elapsed
            seconds += left - first
        planned = _cost(self._plans[host])
        return seconds + planned * rate

    def _front(self, host: int) -> list[Unit]:
        """Take the next chunk, half of what is planned for `host`, from its plan; all of it if little would be left."""
        plan = self._plans[host]
        planned = _cost(plan)
        # worth a call
        least = 0.0
        if self.rates is not None:
            least = max(self._least, _LEAST_SECONDS / self._rate(host))
        most = max(planned / 2, least)
        if planned - most < least / 2:
            most = math.inf
        taken: list[Unit] = []
        cost = 0.0
        clients = 0
        while plan and (not taken or cost + plan[0].cost <= most):
            if taken and clients + len(plan[0].clients) > self.most_clients:
                break
            taken.append(plan.popleft())
            cost += taken[-1].cost
            clients += len(taken[-1].clients)
        return taken

    def _steal(self, host: int, now: float) -> None:
        """Move the second half of the plan of the host that is expected to finish last to `host`."""
        victims = [other for other, plan in self._plans.items() if plan and other != host]
        if not victims:
            return
        victim = max(victims, key=lambda other: self._remaining(other, now))
        plan = self._plans[victim]
        idle = not self._flying[victim]
        if len(plan) == 1 and idle:
            return  # the victim is about to be sent it
        half = _cost(plan) / 2
        moved = [plan.pop()]
        while plan and _cost(moved) + plan[-1].cost <= half:
            moved.append(plan.pop())
        self._plans[host] = deque(reversed(moved))
