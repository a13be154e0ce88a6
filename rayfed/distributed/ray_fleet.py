"""The hosts as long-lived Ray actors (`placement.hosts` above 0).

A down payload goes into the object store once for all hosts; clients' data and state stay on their host.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import ray
import torch
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rayfed.algorithm import State
from rayfed.core.errors import HostLost, UsageError
from rayfed.core.ids import ClientIndex
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint, homes_of
from rayfed.engine.device import device_for
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Host
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, ScoreRequest
from rayfed.engine.serialization import pack, unpack
from rayfed.engine.streamed import fits, room_for

AnyRequest = TypeVar("AnyRequest", bound=Request)

START_SECONDS = 120  # more than an actor ever took to import torch; after that it is waiting for what never comes


class RayHost:
    """A `Host` in its own process: unpacks what arrives, packs what leaves."""

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        clients: Sequence[ClientIndex],
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

    def exchange(self, request: ExchangeRequest, down: Any, unicast: Any) -> Any:
        result = self.host.exchange(request, unpack(down, self.device), unpack(unicast, self.device))
        replies = [reply._replace(up=pack(reply.up)) for reply in result.replies]
        return dataclasses.replace(result, total=_packed(result.total), replies=replies)

    def weigh(self, weights: Mapping[ClientIndex, float]) -> Any:
        return _packed(self.host.weigh(weights))

    def score_downloads(self, request: ScoreRequest, down: Any, unicast: Any) -> Scored:
        return self.host.score_downloads(request, unpack(down, self.device), unpack(unicast, self.device))

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self.host.score_global(request, unpack(model, self.device))

    def gradients(self, request: Request, model: Any, splits: Collection[str]) -> list[Any]:
        gradients = self.host.gradients(request, unpack(model, self.device), splits)
        return [one._replace(total=_packed(one.total)) for one in gradients]

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
        self, request: ExchangeRequest, down: State, unicast: Mapping[ClientIndex, State]
    ) -> list[ExchangeResult]:
        sent = ray.put(pack(down))
        calls = [
            self.hosts[h].exchange.remote(part, sent, _packed_fields(unicast, part.clients))
            for h, part in self._parts(request)
        ]
        return [
            dataclasses.replace(
                result,
                total=self._unpacked(result.total),
                replies=[reply._replace(up=unpack(reply.up, self.device)) for reply in result.replies],
            )
            for result in self._get(calls)
        ]

    def weigh(self, weights: Mapping[ClientIndex, float]) -> list[ExactSum]:
        calls = [
            self.hosts[h].weigh.remote({i: weights[i] for i in clients})
            for h, clients in self._groups(list(weights)).items()
        ]
        return [self._unpacked(total) for total in self._get(calls)]

    def score_downloads(self, request: ScoreRequest, down: State, unicast: Mapping[ClientIndex, State]) -> Scored:
        sent = ray.put(pack(down))
        calls = [
            self.hosts[h].score_downloads.remote(part, sent, _packed_fields(unicast, part.clients))
            for h, part in self._parts(request)
        ]
        return Scored.together(self._get(calls))

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        sent = ray.put(pack(model))  # also to hosts without clients of the request: they may hold test sets
        calls = [self.hosts[h].score_global.remote(part, sent) for h, part in self._parts(request, every_host=True)]
        return Scored.together(self._get(calls))

    def gradients(self, request: Request, model: Any, splits: Collection[str]) -> list[Gradients]:
        sent = ray.put(pack(model))
        parts = self._parts(request, every_host=True)
        calls = [self.hosts[h].gradients.remote(part, sent, splits) for h, part in parts]
        return [
            gradients._replace(total=self._unpacked(gradients.total))
            for result in self._get(calls)
            for gradients in result
        ]

    def save(self) -> dict[ClientIndex, State]:
        parts = self._get([host.save.remote() for host in self.hosts])
        return {i: state for part in parts for i, state in unpack(part, self.device).items()}

    def load(self, states: Mapping[ClientIndex, State]) -> None:
        sent = ray.put(pack(dict(states)))
        self._get([host.load.remote(sent) for host in self.hosts])

    def close(self) -> None:
        for host in self.hosts:
            ray.kill(host)

    def _groups(self, clients: Sequence[ClientIndex]) -> dict[int, list[ClientIndex]]:
        """Return the clients of each host that has any."""
        groups: dict[int, list[ClientIndex]] = {}
        for i in clients:
            groups.setdefault(self.home[i], []).append(i)
        return dict(sorted(groups.items()))

    def _parts(self, request: AnyRequest, *, every_host: bool = False) -> list[tuple[int, AnyRequest]]:
        """Return the request of each host for its own clients; of hosts without any only with `every_host`."""
        groups = self._groups(request.clients)
        hosts = range(len(self.hosts)) if every_host else groups
        return [(h, request.for_clients(groups.get(h, []))) for h in hosts]

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


def _packed_fields(unicast: Mapping[ClientIndex, State], clients: Sequence[ClientIndex]) -> dict[ClientIndex, Any]:
    return {i: pack(unicast[i]) for i in clients if i in unicast}


def _packed(total: ExactSum) -> tuple[Any, Any]:
    return pack(total.value), total.dtypes
