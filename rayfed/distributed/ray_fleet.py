"""The hosts as long-lived Ray actors (`placement.hosts` above 0).

A down payload goes into the object store once for all hosts; clients' data and state stay on their host.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.algorithm import State
from rayfed.core.errors import HostLost, UsageError
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint, homes_of
from rayfed.engine.device import device_for
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Answer, Host
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.serialization import pack, unpack
from rayfed.engine.streamed import fits, room_for

START_SECONDS = 120  # more than an actor ever took to import torch; after that it is waiting for what never comes


class RayHost:
    """A `Host` in its own process: unpacks what arrives, packs what leaves."""

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        clients: Sequence[int],
        tests: Sequence[int],
        gpus: float,
        share: float = 1.0,
    ):
        self.device, self._refused = device_for(gpus), None
        try:
            self.host = Host.of(blueprint, population, self.device, clients, tests, share=share)
        except UsageError as error:  # raised later: from an actor that is being made it would arrive as its death
            self._refused = error

    def ready(self) -> bool:
        if self._refused is not None:
            raise self._refused
        return True

    def exchange(self, ids: Sequence[int], down: Any, own: Any, *rest: Any) -> Any:
        answer = self.host.exchange(ids, unpack(down, self.device), unpack(own, self.device), *rest)
        replies = [reply._replace(up=pack(reply.up)) for reply in answer.replies]
        return answer._replace(total=_packed(answer.total), replies=replies)

    def weigh(self, weights: Mapping[int, float]) -> Any:
        return _packed(self.host.weigh(weights))

    def score_downloads(self, ids: Sequence[int], down: Any, own: Any, *rest: Any) -> Scored:
        return self.host.score_downloads(ids, unpack(down, self.device), unpack(own, self.device), *rest)

    def score_global(self, ids: Sequence[int], model: Any, *rest: Any) -> Scored:
        return self.host.score_global(ids, unpack(model, self.device), *rest)

    def gradients(self, ids: Sequence[int], model: Any, *rest: Any) -> list[Any]:
        found = self.host.gradients(ids, unpack(model, self.device), *rest)
        return [(*one[:2], _packed(one.total), one.n) for one in found]

    def save(self) -> Any:
        return pack(self.host.save())

    def load(self, states: Any) -> None:
        self.host.load(unpack(states, self.device))


class RayFleet:
    """`hosts` actors among which the clients are dealt, by their number of examples.

    Args:
        group: the placement group that holds the trial's bundles; host h uses bundle `first_bundle` + h.

    Raises:
        HostLost: an actor did not start in time, or died.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        placement: Any,
        *,
        device: torch.device,
        group: PlacementGroup,
        first_bundle: int,
    ):
        self.device = device
        hosts, cpus, gpus = placement.hosts, placement.cpus, placement.gpus
        homes = homes_of(population, hosts)
        self.home = {client: host for host, clients in enumerate(homes) for client in clients}
        share = min(gpus, 1.0) if gpus else 1 / hosts  # of the memory of the GPU, or of the machine
        data, plan = ray.put(sendable(population)), ray.put(blueprint)
        made: Any = ray.remote(RayHost)
        self.hosts: list[Any] = []
        for h in range(hosts):
            bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first_bundle + h)
            host = made.options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=bundle)
            tests = list(range(h, len(population.tests), hosts))
            self.hosts.append(host.remote(plan, data, homes[h], tests, gpus, share))
        waiting = [host.ready.remote() for host in self.hosts]
        _, late = ray.wait(waiting, num_returns=hosts, timeout=START_SECONDS)
        if late:
            raise HostLost(
                f"{len(late)} of {hosts} hosts did not start within {START_SECONDS} s, each needing {cpus:g} CPU and "
                f"{gpus:g} GPU; `ray status` tells what is taken"
            )
        self._get(waiting)

    def exchange(
        self, ids: Sequence[int], down: State, own: Mapping[int, State], weights: Mapping[int, float], *rest: Any
    ) -> list[Answer]:
        sent = ray.put(pack(down))
        calls = [
            self.hosts[h].exchange.remote(
                some, sent, {i: pack(own[i]) for i in some if i in own}, {i: weights[i] for i in some}, *rest
            )
            for h, some in self._groups(ids).items()
        ]
        answers = self._get(calls)
        return [
            answer._replace(
                total=self._unpacked(answer.total),
                replies=[reply._replace(up=unpack(reply.up, self.device)) for reply in answer.replies],
            )
            for answer in answers
        ]

    def weigh(self, weights: Mapping[int, float]) -> list[ExactSum]:
        calls = [
            self.hosts[h].weigh.remote({i: weights[i] for i in some}) for h, some in self._groups(list(weights)).items()
        ]
        return [self._unpacked(total) for total in self._get(calls)]

    def score_downloads(self, ids: Sequence[int], down: State, own: Mapping[int, State], *rest: Any) -> Scored:
        sent = ray.put(pack(down))
        calls = [
            self.hosts[h].score_downloads.remote(some, sent, {i: pack(own[i]) for i in some if i in own}, *rest)
            for h, some in self._groups(ids).items()
        ]
        return Scored.together(self._get(calls))

    def score_global(self, ids: Sequence[int], model: Any, *rest: Any) -> Scored:
        sent, groups = ray.put(pack(model)), self._groups(ids)
        calls = [host.score_global.remote(groups.get(h, []), sent, *rest) for h, host in enumerate(self.hosts)]
        return Scored.together(self._get(calls))

    def gradients(self, ids: Sequence[int], model: Any, *rest: Any) -> list[Gradients]:
        sent, groups = ray.put(pack(model)), self._groups(ids)
        calls = [host.gradients.remote(groups.get(h, []), sent, *rest) for h, host in enumerate(self.hosts)]
        return [
            Gradients(one[0], one[1], self._unpacked(one[2]), one[3]) for found in self._get(calls) for one in found
        ]

    def save(self) -> dict[int, State]:
        parts = self._get([host.save.remote() for host in self.hosts])
        return {i: state for part in parts for i, state in unpack(part, self.device).items()}

    def load(self, states: Mapping[int, State]) -> None:
        sent = ray.put(pack(dict(states)))
        self._get([host.load.remote(sent) for host in self.hosts])

    def close(self) -> None:
        for host in self.hosts:
            ray.kill(host)

    def _groups(self, ids: Sequence[int]) -> dict[int, list[int]]:
        groups: dict[int, list[int]] = {}
        for i in ids:
            groups.setdefault(self.home[i], []).append(i)
        return dict(sorted(groups.items()))

    def _unpacked(self, total: Any) -> ExactSum:
        return ExactSum(unpack(total[0], self.device), total[1])

    def _get(self, calls: list[Any]) -> list[Any]:
        try:
            return ray.get(calls)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error  # what the host raised, with its traceback there
        except ray.exceptions.RayActorError as error:
            raise HostLost(f"a host died: {str(error).splitlines()[0]}") from error


def sendable(population: Population) -> Population:
    """`population` for other processes: files go as paths. On several machines they go as bytes, unless these would
    take more than a quarter of the memory: then each machine must have the files."""
    several = len([node for node in ray.nodes() if node["Alive"]]) > 1
    return population.read() if several and fits(population.examples(), room_for(None, "cpu")) else population


def _packed(total: ExactSum) -> tuple[Any, Any]:
    return pack(total.value), total.dtypes
