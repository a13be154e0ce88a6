"""The processes of a fleet's hosts: how they start and join, and what happens to one that dies, hangs or is late."""

import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import ray

from rayfed.core.errors import HostLost
from rayfed.core.records import Event
from rayfed.data.population import Population
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.private_session import is_private
from rayfed.distributed.processes import cause_of_death, kill_process, log_folder
from rayfed.distributed.start_clock import StartClock
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.device import breaks_device
from rayfed.engine.streamed import room_for
from rayfed.experiments.config import Faults, Placement

LOOK_SECONDS = 1.0
"""Seconds between looks at the clock, while hosts start or work."""
_GROW_SECONDS = 10.0  # between looks for new nodes


@dataclass(eq=False)
class Handle:
    """A host as the server knows it.

    Attributes:
        position: Its number.
        actor: Its `RayHost`.
        clock: How long it has been starting.
        later: Whether it was started after the others.
        starting: The call that returns when it is ready; None once it has, or has failed.
        process: Its process and node while it is alive.
    """

    position: int
    actor: Any
    clock: StartClock
    later: bool
    starting: Any
    process: tuple[int, str] | None = None


class Hosts:
    """The hosts of one fleet, by position.

    Args:
        blueprint, population: What they simulate.
        placement: What each of them reserves, and how many there are.
        faults: How many that died or hang are replaced, and how long one may take to start.
        pool: The processes.

    Attributes:
        handles: All that were started, by position.
        events: What happened to them; the server takes the events away.

    Raises:
        HostLost: None started in time.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        placement: Placement,
        faults: Faults,
        pool: HostPool,
    ):
        self.events: list[Event] = []
        self._placement, self._pool = placement, pool
        self._restarts, self._start_seconds = faults.restarts, faults.start_seconds
        number = on_machine = placement.least_hosts
        if placement.grows and placement.cpus:
            on_machine = max(1, int((os.cpu_count() or 1) / placement.cpus))
        self._machines_share = 1 / on_machine
        self._arguments = ray.put(blueprint), ray.put(sendable(population))
        self._looked = time.monotonic()
        self.handles = [self._start(position) for position in range(number)]
        try:
            self._wait_for_first()
            self.look_for_nodes(now=True)
        except BaseException:
            self.close()
            raise

    @property
    def live(self) -> list[Handle]:
        """Those that take part."""
        return [handle for handle in self.handles if handle.process is not None]

    def starting(self) -> list[Any]:
        """Return the calls of those that start, which end when they are ready."""
        return [handle.starting for handle in self.handles if handle.starting is not None]

    def take_in(self, done: Iterable[Any]) -> list[int]:
        """Take in those whose start ended with one of the calls `done`, and return their positions.

        Those that are late, or died while they started, are given up.

        Raises:
            UsageError: A host refuses the plan, as any other would.
        """
        ended, joined = set(done), []
        for handle in [handle for handle in self.handles if handle.starting in ended]:
            try:
                handle.process = ray.get(handle.starting)
            except ray.exceptions.RayError as error:
                if isinstance(error, ray.exceptions.RayTaskError) and not breaks_device(error.cause):
                    raise error.cause from error
                self.lose(handle, "host lost", f" died while it started: {cause_of_death(error)}")
                continue
            handle.starting = None
            joined.append(handle.position)
            if handle.later:
                seconds = f"{handle.clock.seconds:.1f} s"
                self._note("host started", f"host {handle.position}, process {handle.process[0]}, within {seconds}")
        for handle in self.handles:
            if handle.starting is not None and handle.clock.is_late():
                self.lose(handle, "host lost", f" did not start within {self._start_seconds:g} s", replaced=False)
        return joined

    def lose(
        self,
        handle: Handle,
        event: str,
        detail: str,
        *,
        redone: int = 0,
        seconds: float = 0.0,
        replaced: bool = True,
    ) -> None:
        """End a host that died, hangs or is late, and start another in its place if that is allowed.

        Args:
            event, detail: What happened to it; `detail` follows its name.
            redone, seconds: What it cost; see `Event`.
        """
        self._pool.drop(handle.position)
        if handle.process is not None:
            kill_process(handle.process)  # it may be stopped, and then it does not react to Ray
        handle.process = handle.starting = None
        self._note(event, f"host {handle.position}{detail}", redone=redone, seconds=seconds)
        if replaced and self._restarts > 0:
            self._restarts -= 1
            self.handles[handle.position] = self._start(handle.position, later=True)

    def look_for_nodes(self, *, now: bool = False) -> None:
        """Start hosts where the cluster has room; they take part as soon as they are ready."""
        if not self._placement.grows or (not now and time.monotonic() - self._looked < _GROW_SECONDS):
            return
        self._looked = time.monotonic()
        place, free = self._placement, ray.available_resources()
        needs = {name: amount for name, amount in (("CPU", place.cpus), ("GPU", place.gpus)) if amount}
        new = min((int(free.get(name, 0.0) / amount + 1e-6) for name, amount in needs.items()), default=0)
        for _ in range(new - len(self.starting())):
            self.handles.append(self._start(len(self.handles), later=True))

    def last_words(self) -> str:
        """Return in brackets what happened to the host that was lost last."""
        lost = [event.detail for event in self.events if event.event in ("host lost", "host hanging")]
        return f" ({lost[-1]})" if lost else ""

    def close(self) -> None:
        """End the use of the processes."""
        self.handles = []
        self._pool.release()

    def _start(self, position: int, *, later: bool = False) -> Handle:
        actor, gpus = self._pool.actor(position), self._pool.gpus(position)
        share = min(gpus, 1.0) or self._machines_share  # of the memory of its GPU, or of the machine
        clock = StartClock(self._start_seconds, self._pool.group if self._placement.autoscale else None)
        return Handle(position, actor, clock, later, actor.take_up.remote(*self._arguments, gpus, share, position))

    def _wait_for_first(self) -> None:
        """Wait until all hosts are ready, or those that take their place; some may be missing in the end, but not all.

        Where a server was started again, the hosts of the one before may be gone.
        """
        while starting := [handle for handle in self.handles if handle.starting is not None]:
            if self.live and all(handle.later for handle in starting):
                break  # these join when they are ready
            done, _ = ray.wait(self.starting(), num_returns=1, timeout=LOOK_SECONDS)
            self.take_in(done)
        if not self.live:
            place, hosts = self._placement, len(self.handles)
            raise HostLost(
                f"none of {hosts} hosts started within {self._start_seconds:g} s, each needing {place.cpus:g} CPU and "
                f"{place.gpus:g} GPU{self.last_words()}; `ray status` tells what is taken, and Ray's logs are in "
                f"{log_folder()}. On a slow machine, give more faults.start_seconds"
            )

    def _note(self, event: str, detail: str, *, redone: int = 0, seconds: float = 0.0) -> None:
        self.events.append(Event(event=event, detail=detail, redone=redone, seconds=seconds))


def sendable(population: Population) -> Population:
    """`population` for other processes: files go as paths. In a cluster they go as bytes, unless these would take more
    than a quarter of the memory: then each machine must have the files."""
    if is_private() or population.nbytes() > room_for(None, "cpu"):
        return population
    return population.read()
