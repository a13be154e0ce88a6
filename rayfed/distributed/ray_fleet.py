"""The hosts as long-lived Ray actors (`placement.hosts` above 0). Any host runs any client.

The payload for all hosts goes into the object store once. Large states of clients are objects of the hosts that wrote
them. When a host dies, the trial starts again from its last checkpoint.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch

from rayfed.algorithm import Exchange, State
from rayfed.core.errors import HostLost
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex
from rayfed.data.population import Population
from rayfed.distributed.cluster import is_private, on_node, ray_nodes
from rayfed.distributed.host_actor import Message, kept, pack, unpack
from rayfed.distributed.host_calls import HostCalls
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.shared import share
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.client_store import ClientStates
from rayfed.engine.device_data import room_for
from rayfed.engine.fleet import (
    ExchangeRequest,
    ExchangeResult,
    Request,
    ScoreRequest,
    States,
    Versions,
    scored_examples,
    scoring_blocks,
)
from rayfed.engine.host_schedule import MOST_CLIENTS, Chunk, Rates, Schedule, Unit
from rayfed.engine.scoring import Gradients, Scored
from rayfed.engine.training import steps_of
from rayfed.experiments.capacity import memory_share

_MOST_SMALL = 1024  # clients of a chunk, if all that they keep and send is small
_LARGE_PAYLOAD = 2**26  # bytes from which on hosts send their sums one after the other
_Call = Callable[[Any, Chunk], Any]
"""Sends a chunk to the actor of a host, and returns the reference of the result."""


def sendable(population: Population, room: float | None = None) -> Population:
    """Return `population` for other processes.

    Files are sent as paths on this machine alone, and as bytes in a cluster. If the bytes would take more than `room`,
    by default a quarter of the memory, each machine of the cluster must have the files.
    """
    if room is None:
        most = room_for(None, "cpu")
    else:
        most = room
    if is_private() or population.nbytes() > most:
        return population
    return population.read()


class RayStates(ClientStates):
    """The states of clients as messages if they are small, else as references of objects that their hosts own."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device
        self._kept: dict[ClientIndex, Any] = {}

    def __getitem__(self, client: ClientIndex) -> State:
        state = self._kept[client]
        try:
            if isinstance(state, ray.ObjectRef):
                state = ray.get(state)
            found: State = unpack(state, self._device)
        except ray.exceptions.ObjectLostError as error:
            raise HostLost(f"the state of client {client} was lost with its host") from error
        return found

    def sent(self, clients: Iterable[ClientIndex]) -> tuple[dict[ClientIndex, Message | None], list[Any]]:
        """Return the states of `clients`, None in place of the large ones, and the references of these."""
        known = {}
        for client in clients:
            if client in self._kept:
                known[client] = self._kept[client]
        large = {}
        for client, state in known.items():
            if isinstance(state, ray.ObjectRef):
                large[client] = state
        return known | dict.fromkeys(large), list(large.values())

    def commit(self, states: Mapping[ClientIndex, Any], version: int) -> None:
        """Replace the states of some clients."""
        self._kept.update(states)
        self.versions.update(dict.fromkeys(states, version))

    def clear(self) -> None:
        self._kept.clear()
        self.versions.clear()


class RayFleet:
    """A `Fleet` of hosts in processes of Ray; see `rayfed.engine.fleet.Fleet` for its methods.

    Hosts get the clients of each exchange by predicted cost; see `rayfed.engine.host_schedule`.

    Args:
        blueprint, population: What the hosts simulate.
        sent: The blueprint as an object.
        device: The device of this process.
        pool: The processes of the hosts.
        patience: The seconds after which a host that does not answer is late; see `HostCalls`.
        hosts_at_once: The most hosts that run at once, those of other trials included; None: those of `pool`.

    Raises:
        HostLost: From every method: a host died.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        *,
        sent: Any,
        device: torch.device,
        pool: HostPool,
        patience: float = math.inf,
        hosts_at_once: int | None = None,
    ):
        self.device = device
        self._blueprint = blueprint
        self._population = population
        self._actors = pool.actors
        self._ctx = blueprint.context(population, "cpu")  # to predict how many steps clients take
        self._examples = blueprint.training_examples(population)
        self.states = RayStates(device)
        self._rates = Rates()
        self._steps: dict[tuple[Hashable, int], int] = {}  # steps of a client by kind of work and number of examples
        self._most_clients = MOST_CLIENTS  # of a chunk
        self._homes: dict[ClientIndex, int] = {}  # the host that had a client last
        self._number = 0  # of the last payload for all hosts
        self._unweighted: dict[ClientIndex, Any] = {}
        self._ahead: dict[ClientIndex, Any] = {}
        self._asked: list[Any] = []  # calls of all hosts whose results were not taken; see `_ask_for_sums`
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        self._is_large = False  # the last payload for all hosts
        self.vmap_clients = blueprint.vmap_clients
        self._calls = HostCalls(self._actors, patience)
        shared = share(sendable(population))
        shares = self._memory_shares(pool, hosts_at_once or len(self._actors))
        starting = []
        for position, actor in enumerate(self._actors):
            gpus = pool.bundles[position].get("GPU", 0.0)
            call = actor.call.remote("take_up", sent, shared, gpus, shares[position], position)
            starting.append(call)
        for position, call in enumerate(starting):
            self._calls.names[position] += on_node(self._calls.result(call, position))

    def _memory_shares(self, pool: HostPool, at_once: int) -> list[float]:
        """Return for each host the share of its GPU that it has reserved, or its share of the memory of its node."""
        nodes = ray_nodes()
        shares = []
        for process, bundle in zip(self._calls.processes(), pool.bundles, strict=True):
            of_gpu = min(bundle.get("GPU", 0.0), 1.0)
            of_memory = memory_share(dict(bundle), nodes.get(process.node, {}), at_once)
            shares.append(of_gpu or of_memory)
        return shares

    def choose_vmap_clients(self, request: Request, down: State, unicast: States) -> None:
        of_one_host = -(-request.vmap_clients // len(self._actors))
        request = dataclasses.replace(request, vmap_clients=of_one_host)
        call = self._call("fastest_width", request, down, unicast)
        measuring = {}
        for position in self._one_of_each_kind():
            chunk = Chunk(position, [Unit(request.clients)], None)
            measuring[position] = call(self._actors[position], chunk)
        widths = []
        for position, measured in measuring.items():
            widths.append(self._unpack(self._calls.result(measured, position)))
        self.vmap_clients = min(widths)

    def _one_of_each_kind(self) -> list[int]:
        """Return the position of a host for each kind of device; see `HostMethods.kind_of_device`."""
        asked = [actor.call.remote("kind_of_device") for actor in self._actors]
        first: dict[Any, int] = {}
        for position, call in enumerate(asked):
            first.setdefault(self._calls.result(call, position), position)
        return list(first.values())

    def exchange(self, request: ExchangeRequest, down: State | Versions, unicast: States) -> ExchangeResult:
        kind = ("exchange", request.moment.stage, request.moment.exchange, bool(request.score_splits))
        exchange = self._blueprint.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)
        call = self._call("exchange", request, down, unicast)
        costs = {client: self._cost(request, kind, exchange, client) for client in request.clients}
        units = []
        for block in _blocks(request.clients, request.vmap_clients):
            cost = max(costs[client] for client in block) * len(block)
            units.append(Unit(block, cost=cost, home=self._homes.get(block[0])))
        schedule = self._schedule(units, kind)
        result = ExchangeResult(busy=dict.fromkeys(range(len(self._actors)), 0.0))
        summed = bool(exchange.averaged) and not (exchange.server_side_weighting or request.origins)
        for chunk, (part, states, unweighted) in self._dispatch(schedule, kind, call, summed=summed):
            result.add(self._unpack(part))
            self._homes.update(dict.fromkeys(chunk.clients, chunk.host))
            self._unweighted |= unweighted
            for client, state in states.items():
                if isinstance(state, Message):
                    self._bytes_from_hosts += state.nbytes
                    # a view would keep the whole object in which the state arrived, with the others of its chunk
                    copies = tuple(part.copy() for part in state.data)
                    state = state._replace(data=copies)
                self._ahead[client] = state
        states_ahead = self._ahead.values()
        all_small = not self._unweighted and all(isinstance(state, Message) for state in states_ahead)
        if all_small:
            self._most_clients = _MOST_SMALL
        else:
            self._most_clients = MOST_CLIENTS
        if summed:
            del call  # and with it the payload, for whose place in the object store the sums wait
            result.total = self._sums().get("", ExactSum())
        if not request.origins:
            self.commit(request.clients)
        result.predicted = schedule.predicted
        return result

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        calls = dict[int, Any]()
        total = ExactSum()
        replies: dict[int, list[tuple[Any, float]]] = {}  # by host: each adds up what it has written
        for client, weight in weights.items():
            reply = self._unweighted.pop(client)
            replies.setdefault(self._homes[client], []).append((reply, weight))
        for position in sorted(replies):
            calls[position] = self._actors[position].call.remote("weigh", replies[position])
        for position, call in calls.items():
            part = self._unpack(self._calls.result(call, position), shared=not total.is_empty)
            total.merge(part)
        return total

    def commit(self, clients: Iterable[ClientIndex]) -> None:
        states = {}
        for client in clients:
            states[client] = self._ahead.pop(client)
        self.states.commit(states, self._number)

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States) -> Scored:
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)
        call = self._call("score_downloads", request, down, unicast)
        width = 1
        if "adapted" in request.points:
            width = request.vmap_clients
        units = self._scoring_units(request, _blocks(request.clients, width))
        return self._scored(units, call, ("score", request.points))

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        blocks = scoring_blocks(self._population, request)
        units = self._scoring_units(request, blocks)
        return self._scored(units, self._call("score_global", request, model), "score")

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        call = self._call("gradients", request, model)
        examples = []
        units = self._scoring_units(request, _blocks(request.clients, 1))
        for part in self._results(units, "gradients", call):
            examples.extend(part)
        sums = self._sums(shared=False)
        summed = []
        for (domain, split), total in sums.items():
            summed.append(Gradients(domain, split, total, 0))
        return [*examples, *summed]

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        self.states.clear()
        self._number += 1
        for client, state in states:
            self.states.commit({client: kept(pack(state))}, self._number)

    def take_traffic(self) -> tuple[int, int]:
        taken = self._bytes_to_hosts, self._bytes_from_hosts
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        return taken

    # Messages; their bytes are counted

    def _pack(self, value: Any) -> Message:
        message = pack(value)
        self._bytes_to_hosts += message.nbytes
        return message

    def _unpack(self, message: Message, *, shared: bool = False) -> Any:
        self._bytes_from_hosts += message.nbytes
        return unpack(message, self.device, shared=shared)

    def _call(self, method: str, request: Request, payload: Any, unicast: States | None = None) -> _Call:
        """Return what calls a method of the hosts for the clients and test sets of a chunk.

        Args:
            method, request: See `Host`.
            payload: What clients download, or a model of the server.
            unicast: What single clients receive with what they download; None for a model.
        """
        self._number += 1
        message = self._pack(payload)
        number = self._number
        sent = ray.put(message)
        self._is_large = message.nbytes >= _LARGE_PAYLOAD

        def call(actor: Any, chunk: Chunk) -> Any:
            part = request.part(chunk.clients)
            clients = chunk.clients
            if isinstance(part, ScoreRequest):
                part = dataclasses.replace(part, tests=tuple(chunk.tests))
                if unicast is None:
                    part = dataclasses.replace(part, blocks=chunk.blocks)
            if unicast is None:
                return actor.call.remote("ask", method, self._pack((part,)), number, sent)
            small, large = self.states.sent(clients)
            sizes = []
            for state in small.values():
                if state is not None:
                    sizes.append(state.nbytes)
            self._bytes_to_hosts += sum(sizes)
            own = {}
            for client in clients:
                if client in unicast:
                    own[client] = unicast[client]
            message = self._pack((part, own, small))
            return actor.call.remote("ask", method, message, number, sent, *large)

        return call

    # Dealing work to hosts

    def _scored(self, units: Sequence[Unit], call: _Call, kind: Hashable) -> Scored:
        scored = Scored()
        for part in self._results(units, kind, call):
            scored.add(part)
        return scored

    def _results(self, units: Sequence[Unit], kind: Hashable, call: _Call) -> Iterator[Any]:
        """Let hosts work on `units`, and yield the results."""
        for _, message in self._dispatch(self._schedule(units, kind), kind, call):
            yield self._unpack(message)

    def _cost(self, request: ExchangeRequest, kind: Hashable, exchange: Exchange, client: ClientIndex) -> float:
        """Return the predicted cost of a client in an exchange: its steps plus 1 for all else."""
        examples = int(self._examples[client])
        steps = self._steps.get((kind, examples))
        if steps is None:
            ctx = self._ctx.at(request.moment, cohort=request.cohort, client=client, examples=examples)
            steps = steps_of(exchange, ctx, drop_last=self._blueprint.drop_last)
            self._steps[kind, examples] = steps
        return 1.0 + steps

    def _scoring_units(self, request: ScoreRequest, blocks: Sequence[tuple[ClientIndex, ...]]) -> list[Unit]:
        """Return the work of scoring `blocks` of clients, which are all clients of `request`, and its test sets."""
        of_tests = {}
        for k, test in enumerate(self._population.tests):
            of_tests[k] = len(test.examples)
        of_each_client = sum(of_tests[k] for k in request.client_tests)
        examples = scored_examples(self._population, request.clients, request.splits)
        of_clients = dict(zip(request.clients, examples, strict=True))
        units = []
        for block in blocks:
            own = sum(of_clients[client] for client in block)
            units.append(Unit(block, cost=1.0 + own + of_each_client * len(block)))
        for k in request.tests:
            units.append(Unit(tests=(k,), cost=1.0 + of_tests[k]))
        return units

    def _schedule(self, units: Sequence[Unit], kind: Hashable) -> Schedule:
        self._rates.begin(kind)
        hosts = range(len(self._actors))
        return Schedule(units, hosts, self._rates.of(kind, hosts), self._most_clients)

    def _dispatch(
        self, schedule: Schedule, kind: Hashable, call: _Call, *, summed: bool = False
    ) -> Iterator[tuple[Chunk, Any]]:
        """Send chunks to hosts, and yield each chunk with its result.

        With `summed`, hosts are asked for their sums once they have been sent everything, and reply after their last
        chunk.
        """
        calls: dict[Any, Chunk] = {}
        self._calls.begin()
        while not schedule.finished:
            for position, actor in enumerate(self._actors):
                while (chunk := schedule.next(position, time.monotonic())) is not None:
                    calls[call(actor, chunk)] = chunk
            if summed and schedule.all_sent:
                self._ask_for_sums()
                summed = False
            reference = self._calls.first(calls)
            chunk = calls.pop(reference)
            result = self._calls.result(reference, chunk.host)
            now = time.monotonic()
            self._rates.measured(kind, chunk.host, chunk.cost, chunk.elapsed(now))
            schedule.done(chunk, now)
            yield chunk, result

    def _ask_for_sums(self) -> None:
        """Ask all hosts for their sums, or to make room in the object store for one large sum at a time."""
        question = "sums"
        if self._is_large:
            question = "drop_payload"
        self._asked = [actor.call.remote(question) for actor in self._actors]

    def _sums(self, *, shared: bool = True) -> dict[Any, ExactSum]:
        """Return the sums over all chunks since the last call by key; see `HostMethods.sums`.

        Args:
            shared: Whether all hosts have the same keys, so that all but the first need no memory of their own.
        """
        sums: dict[Any, ExactSum] = {}

        def add(message: Message) -> None:
            sums_of_host = self._unpack(message, shared=shared and bool(sums))
            for key, total in sums_of_host.items():
                sums.setdefault(key, ExactSum()).merge(total)

        if not self._asked:
            self._ask_for_sums()
        calls = self._asked
        self._asked = []
        results = [self._calls.result(call, position) for position, call in enumerate(calls)]
        for position, actor in enumerate(self._actors):
            message = results[position]
            if self._is_large:
                message = self._calls.result(actor.call.remote("sums"), position)
            add(message)
        return sums


def _blocks(clients: tuple[ClientIndex, ...], size: int) -> list[tuple[ClientIndex, ...]]:
    """Return the clients in blocks that are trained at once, the same blocks for any number of hosts."""
    starts = range(0, len(clients), size)
    return [clients[first : first + size] for first in starts]
