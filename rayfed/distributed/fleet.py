"""The hosts as long-lived Ray actors (`placement.hosts` above 0). Any host runs any client.

The payload for all clients goes into the object store once. Large states of clients are objects there, which the
server's process owns. When a host dies, Tune starts the trial again from its last checkpoint.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch

from rayfed.algorithm import Exchange, State
from rayfed.core.errors import HostLost
from rayfed.core.ids import ClientIndex
from rayfed.data.clients import SPLITS
from rayfed.data.population import Population
from rayfed.distributed.cluster import is_private, on_node
from rayfed.distributed.host_actor import SMALL_BYTES, Message, SmallStates, pack, pack_state, unpack
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.ray_internals import cause_of_death
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.client_store import ClientStates
from rayfed.engine.device import breaks_device
from rayfed.engine.device_data import room_for
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, ScoreRequest, States
from rayfed.engine.schedule import MOST_CLIENTS, Chunk, Rates, Schedule, Unit
from rayfed.engine.scoring import Gradients, Scored
from rayfed.engine.training import steps_of

_MOST_SMALL = 1024  # clients of a chunk, if their states are small
_Call = Callable[[Any, Chunk], list[Any]]
"""Sends a chunk to the actor of a host, and returns references of the result and of further return values."""


def sendable(population: Population) -> Population:
    """Return `population` for other processes.

    Files are sent as paths on this machine alone, and as bytes in a cluster. If the bytes would take more than a
    quarter of the memory, each machine of the cluster must have the files.
    """
    if is_private() or population.nbytes() > room_for(None, "cpu"):
        return population
    return population.read()


class RayStates(ClientStates):
    """The states of clients as objects that this process owns."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._objects: dict[ClientIndex, Any] = {}  # references, or messages if they are small

    def __getitem__(self, client: ClientIndex) -> State:
        kept = self._objects[client]
        try:
            state: State = unpack(ray.get(kept) if isinstance(kept, ray.ObjectRef) else kept, self._device)
        except ray.exceptions.ObjectLostError as error:
            raise HostLost(f"the state of client {client} was lost with its node") from error
        return state

    def sent(self, clients: Iterable[ClientIndex]) -> tuple[SmallStates, list[Any]]:
        """Return the states of `clients` without the large ones, and the objects of these."""
        known = {client: self._objects[client] for client in clients if client in self._objects}
        small = {client: None if isinstance(kept, ray.ObjectRef) else kept for client, kept in known.items()}
        return small, [kept for client, kept in known.items() if small[client] is None]

    def commit(self, states: Mapping[ClientIndex, Any], version: int) -> None:
        """Replace the states of some clients."""
        self._objects.update(states)
        self.versions.update(dict.fromkeys(states, version))

    def clear(self) -> None:
        self._objects.clear()
        self.versions.clear()


class RayFleet:
    """Hosts to which the clients of each exchange are assigned by predicted cost; see `rayfed.engine.schedule`.

    Args:
        blueprint, population: What the hosts simulate.
        device: The device of this process.
        pool: The processes of the hosts.

    Raises:
        HostLost: From every method: a host died.
    """

    def __init__(self, blueprint: Blueprint, population: Population, *, device: torch.device, pool: HostPool):
        self.device, self._blueprint, self._population = device, blueprint, population
        self._actors = pool.actors
        self._ctx = blueprint.context(population, "cpu")  # to predict how many steps clients take
        self._examples = blueprint.training_examples(population)
        self.states = RayStates(device)
        self._rates = Rates()
        self._steps: dict[tuple[Hashable, int], int] = {}  # steps of a client by kind of work and number of examples
        self._small: set[Hashable] = set()  # kinds of work after which all states were small
        self._homes: dict[ClientIndex, int] = {}  # the host that had a client last
        self._number = 0  # of the last payload for all hosts
        self._unweighted: dict[ClientIndex, Any] = {}
        self._ahead: dict[ClientIndex, Any] = {}
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        self.vmap_clients = blueprint.vmap_clients
        arguments = ray.put(blueprint), ray.put(sendable(population))
        starting = [
            actor.call.remote("take_up", *arguments, gpus, min(gpus, 1.0) or 1 / len(self._actors), position)
            for position, (actor, gpus) in enumerate(zip(self._actors, pool.gpus, strict=True))
        ]
        self._names = [f"host {position}" for position in range(len(starting))]
        for position, call in enumerate(starting):
            self._names[position] += on_node(self._result(call, position))

    def choose_vmap_clients(self, request: Request, down: State, unicast: States) -> None:
        request = dataclasses.replace(request, vmap_clients=-(-request.vmap_clients // len(self._actors)))
        call = self._clients_call("fastest_width", request, down, unicast)
        (self.vmap_clients,) = self._results([Unit(request.clients)], "measure", call)

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        kind = ("exchange", request.moment.stage, request.moment.exchange, bool(request.score_splits))
        exchange = self._blueprint.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        number, sent = self._sent_to_all(down)
        weighing = exchange.server_side_weighting or bool(request.origins)
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            clients = chunk.clients
            small, large = self._sent_states(clients)
            separate = weighing or kind not in self._small
            method = actor.call
            if separate:
                method = method.options(num_returns=1 + len(clients) * (2 if weighing else 1))
            message = self._for_some(request, clients, unicast)
            returned = method.remote("exchange", message, number, sent, small, separate, *large)
            return list(returned) if separate else [returned]

        blocks = _blocks(request.clients, request.vmap_clients)
        costs = {client: self._cost(request, kind, exchange, client) for client in request.clients}
        units = [
            Unit(block, cost=max(costs[client] for client in block) * len(block), home=self._homes.get(block[0]))
            for block in blocks
        ]
        result, new_states = ExchangeResult(), dict[ClientIndex, Any]()
        schedule = self._schedule(units, kind)
        chunks = list[Chunk]()
        for chunk, (part, small), others in self._dispatch(schedule, kind, call):
            clients = chunk.clients
            result.add(self._unpack(part))
            chunks.append(chunk)
            self._homes.update(dict.fromkeys(clients, chunk.host))
            self._bytes_from_hosts += sum(state.nbytes for state in small.values())
            new_states.update(zip(clients, others, strict=False))
            self._unweighted.update(zip(clients, others[len(clients) :], strict=False))
            new_states.update((client, _kept(state)) for client, state in small.items())
            if len(small) == len(clients):
                self._small.add(kind)
        if exchange.averaged and not weighing:
            result.total = self._sums(chunks).get("", ExactSum())
        self._ahead |= new_states
        if not request.origins:
            self.commit(new_states)
        for position in range(len(self._actors)):
            result.busy.setdefault(position, 0.0)
        result.predicted = schedule.predicted
        return result

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        unweighted = {client: self._unweighted.pop(client) for client in weights}
        self._number += 1

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            some = {client: weights[client] for client in chunk.clients}
            return [actor.call.remote("weigh", self._number, some, *(unweighted[client] for client in some))]

        schedule = self._schedule([Unit((client,)) for client in weights], "weigh")
        return self._sums([chunk for chunk, *_ in self._dispatch(schedule, "weigh", call)]).get("", ExactSum())

    def commit(self, clients: Iterable[ClientIndex]) -> None:
        self.states.commit({client: self._ahead.pop(client) for client in clients}, self._number)

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States) -> Scored:
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)
        call = self._clients_call("score_downloads", request, down, unicast)
        return self._scored(request, call, ("score", request.points))

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self._scored(request, self._model_call("score_global", request, model), "score")

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        call, kind = self._model_call("gradients", request, model), "gradients"
        done = list(self._dispatch(self._schedule(self._scoring_units(request), kind), kind, call))
        examples = [each for _, message, _ in done for each in self._unpack(message)]
        sums = self._sums([chunk for chunk, *_ in done], shared=False)
        return [*examples, *(Gradients(domain, split, total, 0) for (domain, split), total in sums.items())]

    def hashes(self) -> dict[ClientIndex, str]:
        def call(actor: Any, chunk: Chunk) -> list[Any]:
            small, large = self._sent_states(chunk.clients)
            return [actor.call.remote("hashes", small, *large)]

        hashes: dict[ClientIndex, str] = {}
        for some in self._results([Unit((client,)) for client in self.states], "hashes", call):
            hashes |= some
        return hashes

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        self.states.clear()
        self._number += 1
        for client, state in states:
            self.states.commit({client: _kept(pack_state(state))}, self._number)

    def take_traffic(self) -> tuple[int, int]:
        taken = self._bytes_to_hosts, self._bytes_from_hosts
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        return taken

    # Messages, whose bytes are counted

    def _pack(self, value: Any) -> Message:
        message = pack(value)
        self._bytes_to_hosts += message.nbytes
        return message

    def _sent_to_all(self, payload: Any) -> tuple[int, Any]:
        """Return the number of a payload for all hosts, and its object."""
        self._number += 1
        return self._number, ray.put(self._pack(payload))

    def _unpack(self, message: Message, *, shared: bool = False) -> Any:
        self._bytes_from_hosts += message.nbytes
        return unpack(message, self.device, shared=shared)

    def _for_some(self, request: Request, clients: Sequence[ClientIndex], unicast: States) -> Message:
        """Return the part of a request for `clients`, and what single clients receive."""
        return self._pack((request.part(clients), {client: unicast[client] for client in clients if client in unicast}))

    def _sent_states(self, clients: Iterable[ClientIndex]) -> tuple[SmallStates, list[Any]]:
        small, large = self.states.sent(clients)
        self._bytes_to_hosts += sum(state.nbytes for state in small.values() if state is not None)
        return small, large

    # Dealing work to hosts

    def _scored(self, request: ScoreRequest, call: _Call, kind: Hashable) -> Scored:
        scored = Scored()
        for part in self._results(self._scoring_units(request), kind, call):
            scored.add(part)
        return scored

    def _results(self, units: Sequence[Unit], kind: Hashable, call: _Call) -> Iterator[Any]:
        """Let hosts work on `units`, and yield the results."""
        for _, message, _ in self._dispatch(self._schedule(units, kind), kind, call):
            yield self._unpack(message)

    def _cost(self, request: ExchangeRequest, kind: Hashable, exchange: Exchange, client: ClientIndex) -> float:
        """Return the predicted cost of a client in an exchange: its steps plus 1 for all else."""
        examples = int(self._examples[client])
        if (steps := self._steps.get((kind, examples))) is None:
            ctx = self._ctx.at(request.moment, cohort=request.cohort, client=client, examples=examples)
            steps = steps_of(exchange, ctx, drop_last=self._blueprint.drop_last)
            self._steps[kind, examples] = steps
        return 1.0 + steps

    def _scoring_units(self, request: ScoreRequest) -> list[Unit]:
        of_tests = {k: len(test.examples) for k, test in enumerate(self._population.tests)}
        of_each_client = sum(of_tests[k] for k in request.client_tests)
        columns = [SPLITS.index(split) for split in request.splits if split in SPLITS]

        def examples(client: ClientIndex) -> int:
            return of_each_client + int(self._population.clients.sizes[client, columns].sum())

        blocks = _blocks(request.clients, request.vmap_clients if "adapted" in request.points else 1)
        return [
            *(Unit(block, cost=1.0 + sum(map(examples, block))) for block in blocks),
            *(Unit(tests=(k,), cost=1.0 + of_tests[k]) for k in request.tests),
        ]

    def _clients_call(self, name: str, request: Request, down: State, unicast: States) -> _Call:
        number, sent = self._sent_to_all(down)

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            small, large = self._sent_states(chunk.clients)
            message = self._for_some(request, chunk.clients, unicast)
            return [actor.call.remote("on_clients", name, message, number, sent, small, *large)]

        return call

    def _model_call(self, name: str, request: ScoreRequest, model: Any) -> _Call:
        number, sent = self._sent_to_all(model)

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            part = dataclasses.replace(request.part(chunk.clients), tests=tuple(chunk.tests))
            return [actor.call.remote(name, part, number, sent)]

        return call

    def _schedule(self, units: Sequence[Unit], kind: Hashable) -> Schedule:
        self._rates.begin(kind)
        hosts = range(len(self._actors))
        return Schedule(units, hosts, self._rates.of(kind, hosts), _MOST_SMALL if kind in self._small else MOST_CLIENTS)

    def _dispatch(self, schedule: Schedule, kind: Hashable, call: _Call) -> Iterator[tuple[Chunk, Any, list[Any]]]:
        """Send chunks to hosts and yield each chunk with its result and the references of its other return values."""
        calls: dict[Any, tuple[Chunk, list[Any]]] = {}
        while not schedule.finished:
            for position, actor in enumerate(self._actors):
                while (chunk := schedule.next(position, time.monotonic())) is not None:
                    first, *others = call(actor, chunk)
                    calls[first] = chunk, others
            for reference in ray.wait(list(calls), num_returns=1)[0]:
                chunk, others = calls.pop(reference)
                result = self._result(reference, chunk.host)
                now = time.monotonic()
                self._rates.measured(kind, chunk.host, chunk.cost, chunk.elapsed(now))
                schedule.done(chunk, now)
                yield chunk, result, others

    def _sums(self, chunks: Iterable[Chunk], *, shared: bool = True) -> dict[Any, ExactSum]:
        """Return the sums that the hosts hold over `chunks`, which were sent with the last payload, by key.

        Args:
            shared: Whether all hosts have the same keys, so that all but the first need no memory of their own.
        """
        units: dict[int, set[Hashable]] = defaultdict(set)
        for chunk in chunks:
            units[chunk.host].update(chunk.clients, (("test set", test) for test in chunk.tests))
        calls = {host: self._actors[host].call.remote("sums", self._number, some) for host, some in units.items()}
        sums: dict[Any, ExactSum] = {}
        for host, call in calls.items():
            for key, total in self._unpack(self._result(call, host), shared=shared and bool(sums)).items():
                sums.setdefault(key, ExactSum()).merge(total)
        return sums

    def _result(self, call: Any, position: int) -> Any:
        """Return the result of a call of the host at `position`, or raise what the host raised.

        Raises:
            HostLost: The host is gone, or its GPU does not compute any more.
        """
        try:
            return ray.get(call)
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ray.exceptions.RayError) or breaks_device(error.cause):
                raise HostLost(f"{self._names[position]} failed: {cause_of_death(error)}") from error
            raise error.cause from error  # with its traceback in the host
        except ray.exceptions.RayError as error:  # a dead actor or node, or an object that was lost with its node
            raise HostLost(f"{self._names[position]} died: {cause_of_death(error)}") from error


def _blocks(clients: tuple[ClientIndex, ...], size: int) -> list[tuple[ClientIndex, ...]]:
    """Return the clients in blocks that are trained at once, the same blocks for any number of hosts."""
    return [clients[first : first + size] for first in range(0, len(clients), size)]


def _kept(state: Message) -> Any:
    """Return a state as `RayStates` keeps it."""
    if state.nbytes > SMALL_BYTES:
        return ray.put(state)
    # a view would keep the whole object in which the state arrived, with the others of its chunk
    return state._replace(tensors=[(data.copy(), dtype, shape) for data, dtype, shape in state.tensors])
