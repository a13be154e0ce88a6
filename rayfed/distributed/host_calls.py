"""Calls of a trial's hosts: their results, hosts that are late, and what killed a host."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray

from rayfed.core.errors import HostLost, breaks_device
from rayfed.core.machine import Process
from rayfed.distributed import liveness
from rayfed.distributed.ray_internals import PreemptedHost, cause_of_death, is_preempted
from rayfed.engine.host_schedule import Chunk

_TICK_SECONDS = 30.0  # between two looks at the clock, at most
_ALIVE_SECONDS = 5.0  # for a host to answer that it lives


class HostCalls:
    """Waits for results of hosts.

    A host is late if it has not answered for `patience` seconds and ten times what its call was predicted to take. Its
    node is then asked whether its process works; if not, the host is lost.

    Args:
        actors: The hosts, by position.

    Attributes:
        names: What messages call the hosts.

    Raises:
        HostLost: From every method: a host is gone, or its GPU does not compute any more.
    """

    def __init__(self, actors: Sequence[Any], patience: float):
        self.names = [f"host {position}" for position in range(len(actors))]
        self._actors = actors
        self._patience = patience
        self._calls_of_processes = [actor.process.remote() for actor in actors]
        self._processes: list[Process] = []
        self._heard = [time.monotonic()] * len(actors)  # when hosts have answered last, or were sent their first call
        self._tick = min(_TICK_SECONDS, patience / 4)
        self._looked = time.monotonic()

    def processes(self) -> list[Process]:
        """Return the processes of the hosts, once they have started."""
        if not self._processes:
            processes = []
            for position, call in enumerate(self._calls_of_processes):
                processes.append(self.result(call, position))
            self._processes = processes
        return self._processes

    def begin(self) -> None:
        """Note that all hosts are idle and are going to be sent their first calls."""
        self._heard = [time.monotonic()] * len(self._actors)

    def first(self, calls: Mapping[Any, Chunk]) -> Any:
        """Wait for a result, and return its call."""
        while True:
            done, others = ray.wait(list(calls), num_returns=1, timeout=self._tick)
            self._ask_late_hosts(calls[call] for call in others)
            if done:
                return done[0]

    def result(self, call: Any, position: int) -> Any:
        """Return the result of a call of the host at `position`, or raise what the host raised."""
        self._heard[position] = time.monotonic()
        while not ray.wait([call], timeout=self._tick)[0]:
            self._ask_late_hosts([Chunk(position, (), None)])
        self._heard[position] = time.monotonic()
        try:
            return ray.get(call)
        except ray.exceptions.RayError as error:
            self._raise(error, position)

    def _raise(self, error: Any, position: int) -> None:
        is_task_error = isinstance(error, ray.exceptions.RayTaskError)
        if is_task_error:
            cause = error.cause
        else:
            cause = error
        if not isinstance(cause, ray.exceptions.RayError) and not breaks_device(cause):
            raise cause from error  # with its traceback in the host
        name = self.names[position]
        if isinstance(error, ray.exceptions.ObjectLostError):
            preempted = self._preempted()
            if preempted:
                raise PreemptedHost(f"{preempted} died: its node was taken away") from error
            raise HostLost(f"{name} failed: {cause_of_death(error)}") from error
        if is_task_error:
            raise HostLost(f"{name} failed: {cause_of_death(error)}") from error
        died = f"{name} died: {cause_of_death(error)}"  # the actor or its node
        if is_preempted(error):
            raise PreemptedHost(died) from error
        raise HostLost(died) from error

    def _preempted(self) -> str:
        """Return the name of a host whose node was taken away, "" if there is none."""
        calls = []
        for actor in self._actors:
            calls.append(actor.process.remote())
        names = dict(zip(calls, self.names, strict=True))
        answered, _ = ray.wait(calls, num_returns=len(calls), timeout=_ALIVE_SECONDS)
        for call in answered:
            try:
                ray.get(call)
            except ray.exceptions.RayError as error:
                if is_preempted(error):
                    return str(names[call])
        return ""

    def _ask_late_hosts(self, chunks: Iterable[Chunk]) -> None:
        """Ask the nodes of late hosts about them; `chunks` are those that hosts work on."""
        now = time.monotonic()
        if now < self._looked + self._tick:
            return
        self._looked = now
        for chunk in chunks:
            limit = max(self._patience, liveness.TIMES_PREDICTED * (chunk.predicted or 0.0))
            if not self._processes or now < self._heard[chunk.host] + limit:
                continue  # it has not started yet, or is not late
            found = liveness.reason(liveness.end_if_stuck(self._processes[chunk.host]))
            if found:
                raise HostLost(f"{self.names[chunk.host]} died: {found}")
            self._heard[chunk.host] = time.monotonic()  # it works, and is asked again after the same time
