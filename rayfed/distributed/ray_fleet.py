"""The hosts as long-lived Ray actors (`placement.hosts` above 0).

Any host runs any client. What all clients receive goes into the object store once; the state of a client is an object
there, which the server's process owns. So a host that dies takes nothing with it but the work under way, which other
hosts do again, with the same result.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ray
import torch

from rayfed.algorithm import Exchange, State
from rayfed.core.errors import HostLost, StatesLost
from rayfed.core.ids import ClientIndex
from rayfed.data.clients import SPLITS
from rayfed.data.population import Population
from rayfed.distributed.host_pool import HostPool
from rayfed.distributed.hosts import LOOK_SECONDS, Hosts
from rayfed.distributed.messages import Message, pack, unpack
from rayfed.distributed.processes import cause_of_death
from rayfed.distributed.ray_host import SMALL_BYTES, SentStates
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.client_store import ClientStates
from rayfed.engine.device import breaks_device
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, Scored, ScoreRequest
from rayfed.engine.schedule import MOST_CLIENTS, Chunk, Rates, Schedule, Unit
from rayfed.engine.training import steps_of
from rayfed.experiments.config import Faults, Placement

_MOST_SMALL = 1024  # clients of a chunk, if their states are small

_LOST_HOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.NodeDiedError,
    ray.exceptions.LocalRayletDiedError,
)


class RayStates(ClientStates):
    """The states of clients as objects that this process owns."""

    def __init__(self, device: torch.device):
        self._device = device
        self._objects: dict[ClientIndex, Any] = {}  # references, or messages if they are small
        self._versions: dict[ClientIndex, int] = {}

    def __iter__(self) -> Iterator[ClientIndex]:
        return iter(sorted(self._objects))

    def __len__(self) -> int:
        return len(self._objects)

    def __contains__(self, client: object) -> bool:
        return client in self._objects

    def __getitem__(self, client: ClientIndex) -> State:
        kept = self._objects[client]
        try:
            state: State = unpack(ray.get(kept) if isinstance(kept, ray.ObjectRef) else kept, self._device)
        except ray.exceptions.ObjectLostError as error:
            raise StatesLost(f"the state of client {client} was lost with its machine") from error
        return state

    def version(self, client: ClientIndex) -> int:
        return self._versions[client]

    def sent(self, clients: Iterable[ClientIndex]) -> tuple[SentStates, list[Any]]:
        """Return the states of those of `clients` that have one: the small ones, and the objects of the others."""
        known = {client: self._objects[client] for client in clients if client in self._objects}
        small = {client: kept for client, kept in known.items() if not isinstance(kept, ray.ObjectRef)}
        states = SentStates({client: self._versions[client] for client in known}, small)
        return states, [kept for client, kept in known.items() if client not in small]

    def commit(self, states: Mapping[ClientIndex, Any], version: int) -> None:
        """Replace the states of some clients."""
        self._objects.update(states)
        self._versions.update(dict.fromkeys(states, version))

    def clear(self) -> None:
        self._objects.clear()
        self._versions.clear()


class RayFleet:
    """Actors among which the clients of each exchange are dealt by predicted cost; see `rayfed.engine.schedule`.

    Args:
        placement: What each host reserves, and how many there are.
        faults: How many hosts that died or hang are replaced, and how long they may take.
        device: The device of this process.
        pool: The processes.

    Raises:
        HostLost: No actor started in time, or all died.
        StatesLost: States of clients were lost with a machine.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        placement: Placement,
        faults: Faults,
        *,
        device: torch.device,
        pool: HostPool,
    ):
        self.device, self._blueprint, self._population = device, blueprint, population
        self._pool, self._patience = pool, faults.patience
        self._ctx = blueprint.context(population, "cpu")  # to predict how many steps clients take
        self._examples = blueprint.training_examples(population)
        self._states = RayStates(device)
        self._rates = Rates()
        self._steps: dict[tuple[Hashable, int], int] = {}  # that a client takes, by kind of work and examples
        self._small: set[Hashable] = set()  # kinds of work after which all states were small
        self._number = 0  # that of the last call to all hosts
        self._unweighted: dict[ClientIndex, Any] = {}
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        self.hosts = Hosts(blueprint, population, placement, faults, pool)
        self.events = self.hosts.events
        self.vmap_clients = blueprint.vmap_clients

    @property
    def states(self) -> RayStates:
        """The states of the clients that have one."""
        return self._states

    def choose_vmap_clients(self, request: Request, down: State, unicast: Mapping[ClientIndex, State]) -> None:
        request = dataclasses.replace(request, vmap_clients=-(-request.vmap_clients // len(self.hosts.handles)))
        call = self._clients_call("fastest_width", request, down, unicast)
        (self.vmap_clients,) = self._results([Unit(request.clients)], "measure", call)

    def exchange(self, request: ExchangeRequest, down: State, unicast: Mapping[ClientIndex, State]) -> ExchangeResult:
        kind = ("exchange", request.moment.stage, request.moment.exchange, bool(request.score_splits))
        exchange = self._blueprint.algorithm.exchanges(request.moment.stage)[request.moment.exchange]
        self._number += 1
        number, sent = self._number, ray.put(self._pack(down))
        weighing = exchange.server_side_weighting
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            clients = chunk.clients
            states, references = self._sent_states(clients)
            separate = weighing or kind not in self._small
            method = actor.exchange
            if separate:
                method = method.options(num_returns=1 + len(clients) * (2 if weighing else 1))
            returned = method.remote(
                self._for_some(request, clients, unicast), number, sent, separate, states, *references
            )
            return list(returned) if separate else [returned]

        blocks = _blocks(request.clients, request.vmap_clients)
        costs = {client: self._cost(request, kind, exchange, client) for client in request.clients}
        units = [Unit(block, cost=max(costs[client] for client in block) * len(block)) for block in blocks]
        result, new_states, self._unweighted = ExchangeResult(), dict[ClientIndex, Any](), {}
        schedule = self._schedule(units, kind)
        for chunk, (part, total, small), others in self._dispatch(schedule, kind, call):
            clients = chunk.clients
            result.add(self._unpack(part))
            is_first = result.total.value is None  # to which the others are added
            result.total.merge(self._unpack(total, shared=not is_first))
            self._bytes_from_hosts += sum(state.nbytes for state in small.values())
            kept = {client: _kept(state) for client, state in small.items()}
            if not others:
                new_states.update(kept)
                continue
            new_states.update(zip(clients, others, strict=False))
            self._unweighted.update(zip(clients, others[len(clients) :], strict=False))
            new_states.update(kept)
            if len(small) == len(clients):
                self._small.add(kind)
        self._states.commit(new_states, number)
        for handle in self.hosts.handles:
            result.busy.setdefault(handle.position, 0.0)
        result.predicted = schedule.predicted
        return result

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        unweighted, self._unweighted = self._unweighted, {}

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            some = {client: weights[client] for client in chunk.clients}
            return [actor.weigh.remote(some, *(unweighted[client] for client in some))]

        total = ExactSum()
        for part in self._results([Unit((client,)) for client in weights], "weigh", call):
            total.merge(part)
        return total

    def score_downloads(self, request: ScoreRequest, down: State, unicast: Mapping[ClientIndex, State]) -> Scored:
        request = dataclasses.replace(request, vmap_clients=self.vmap_clients or 1)
        call = self._clients_call("score_downloads", request, down, unicast)
        return self._scored(request, call, ("score", request.points))

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self._scored(request, self._model_call("score_global", request, model), "score")

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        call = self._model_call("gradients", request, model)
        return list(itertools.chain.from_iterable(self._results(self._scoring_units(request), "gradients", call)))

    def hashes(self) -> dict[ClientIndex, str]:
        def call(actor: Any, chunk: Chunk) -> list[Any]:
            states, references = self._sent_states(chunk.clients)
            return [actor.hashes.remote(states, *references)]

        hashes: dict[ClientIndex, str] = {}
        for some in self._results([Unit((client,)) for client in self._states], "hashes", call):
            hashes |= some
        return hashes

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        self._states.clear()
        self._number += 1
        for client, state in states:
            self._states.commit({client: _kept(pack(state))}, self._number)

    def take_traffic(self) -> tuple[int, int]:
        taken = self._bytes_to_hosts, self._bytes_from_hosts
        self._bytes_to_hosts = self._bytes_from_hosts = 0
        return taken

    def close(self) -> None:
        self.hosts.close()

    # Messages, whose bytes are counted

    def _pack(self, value: Any) -> Message:
        message = pack(value)
        self._bytes_to_hosts += message.nbytes
        return message

    def _unpack(self, message: Message, *, shared: bool = False) -> Any:
        self._bytes_from_hosts += message.nbytes
        return unpack(message, self.device, shared=shared)

    def _for_some(
        self, request: Request, clients: Sequence[ClientIndex], unicast: Mapping[ClientIndex, State]
    ) -> Message:
        """Return the part of a request that is for `clients`, and what single ones of them receive."""
        return self._pack((request.part(clients), {client: unicast[client] for client in clients if client in unicast}))

    def _sent_states(self, clients: Iterable[ClientIndex]) -> tuple[SentStates, list[Any]]:
        """Return the states of `clients`; see `RayStates.sent`. The large ones do not come from this process."""
        states, references = self._states.sent(clients)
        self._bytes_to_hosts += sum(state.nbytes for state in states.small.values())
        return states, references

    # Dealing work to hosts

    def _scored(self, request: ScoreRequest, call: Callable[[Any, Chunk], list[Any]], kind: Hashable) -> Scored:
        scored = Scored()
        for part in self._results(self._scoring_units(request), kind, call):
            scored.add(part)
        return scored

    def _results(self, units: Sequence[Unit], kind: Hashable, call: Callable[[Any, Chunk], list[Any]]) -> Iterator[Any]:
        """Have `units` done, and yield the results."""
        for _, message, _ in self._dispatch(self._schedule(units, kind), kind, call):
            yield self._unpack(message)

    def _cost(self, request: ExchangeRequest, kind: Hashable, exchange: Exchange, client: ClientIndex) -> float:
        """Return the predicted cost of a client in an exchange: its steps, and one for the rest."""
        examples = int(self._examples[client])
        if (steps := self._steps.get((kind, examples))) is None:
            ctx = self._ctx.at(request.moment, cohort=request.cohort, client=client, examples=examples)
            steps = steps_of(exchange, ctx, drop_last=self._blueprint.drop_last)
            self._steps[kind, examples] = steps
        return 1.0 + steps

    def _scoring_units(self, request: ScoreRequest) -> list[Unit]:
        of_tests = {k: len(test.examples) for k, test in enumerate(self._population.tests)}
        of_each_client = sum(of_tests[k] for k in request.client_tests)

        sizes = self._population.clients.sizes
        columns = [SPLITS.index(split) for split in request.splits if split in SPLITS]

        def examples(client: ClientIndex) -> int:
            return of_each_client + int(sizes[client, columns].sum())

        blocks = _blocks(request.clients, request.vmap_clients if "adapted" in request.points else 1)
        return [
            *(Unit(block, cost=1.0 + sum(map(examples, block))) for block in blocks),
            *(Unit(tests=(k,), cost=1.0 + of_tests[k]) for k in request.tests),
        ]

    def _clients_call(
        self, name: str, request: Request, down: State, unicast: Mapping[ClientIndex, State]
    ) -> Callable[[Any, Chunk], list[Any]]:
        self._number += 1
        number, sent = self._number, ray.put(self._pack(down))

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            states, references = self._sent_states(chunk.clients)
            message = self._for_some(request, chunk.clients, unicast)
            return [getattr(actor, name).remote(message, number, sent, states, *references)]

        return call

    def _model_call(self, name: str, request: ScoreRequest, model: Any) -> Callable[[Any, Chunk], list[Any]]:
        self._number += 1
        number, sent = self._number, ray.put(self._pack(model))

        def call(actor: Any, chunk: Chunk) -> list[Any]:
            part = dataclasses.replace(request.part(chunk.clients), tests=tuple(chunk.tests))
            return [getattr(actor, name).remote(part, number, sent)]

        return call

    def _schedule(self, units: Sequence[Unit], kind: Hashable) -> Schedule:
        self.hosts.look_for_nodes()
        self._rates.begin(kind)
        live = [handle.position for handle in self.hosts.live]
        rates = self._rates.of(kind, range(len(self.hosts.handles)))
        most = _MOST_SMALL if kind in self._small else MOST_CLIENTS
        return Schedule(units, live, rates, self._patience, most)

    def _dispatch(
        self, schedule: Schedule, kind: Hashable, call: Callable[[Any, Chunk], list[Any]]
    ) -> Iterator[tuple[Chunk, Any, list[Any]]]:
        """Send chunks to hosts and yield each chunk with its result and the references of its other return values."""
        calls: dict[Any, tuple[Chunk, list[Any]]] = {}
        try:
            while not schedule.finished:
                for handle in self.hosts.live:
                    while (chunk := schedule.next(handle.position, time.monotonic())) is not None:
                        first, *others = call(handle.actor, chunk)
                        calls[first] = chunk, others
                for reference in self._wait(calls, schedule):
                    if reference not in calls:
                        continue  # its host was dropped
                    chunk, others = calls.pop(reference)
                    try:
                        result = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        _raise_unless_lost(error)
                        self._lose(chunk.host, "host lost", cause_of_death(error), schedule, calls)
                        continue
                    now = time.monotonic()
                    self._rates.measured(kind, chunk.host, chunk.cost, chunk.elapsed(now))
                    schedule.done(chunk, now)
                    yield chunk, result, others
        finally:  # after an error, nobody waits for the rest
            for host in {chunk.host for chunk, _ in calls.values()}:
                self._pool.drop(host)

    def _wait(self, calls: dict[Any, tuple[Chunk, list[Any]]], schedule: Schedule) -> list[Any]:
        """Wait for the next result; meanwhile take in hosts that are ready, and drop those that died or hang."""
        starting = self.hosts.starting()
        if not calls and not starting:
            raise HostLost(f"all hosts are lost{self.hosts.last_words()}; faults.restarts replaces more of them")
        done, _ = ray.wait([*calls, *starting], num_returns=1, timeout=LOOK_SECONDS)
        now = time.monotonic()
        for position in self.hosts.take_in(done):
            schedule.join(position)
        for position in schedule.hanging(now):
            self._lose(position, "host hanging", "gave no result in time", schedule, calls)
        return [reference for reference in done if reference in calls]

    def _lose(self, position: int, event: str, detail: str, schedule: Schedule, calls: dict[Any, Any]) -> None:
        """Give the work of a host that died or hangs to the others, and the host up."""
        now, lost = time.monotonic(), schedule.lost(position)
        for reference in [reference for reference, (chunk, *_) in calls.items() if chunk.host == position]:
            del calls[reference]
        self._rates.forget(position)
        redone = sum(len(chunk.clients) for chunk in lost)
        seconds = max((chunk.elapsed(now) for chunk in lost), default=0.0)
        self.hosts.lose(self.hosts.handles[position], event, f": {detail}", redone=redone, seconds=seconds)


def _raise_unless_lost(error: ray.exceptions.RayError) -> None:
    """Raise what a host raised, unless it means that the host is gone."""
    if isinstance(error, ray.exceptions.RayTaskError):
        if isinstance(error.cause, ray.exceptions.ObjectLostError):
            raise StatesLost("states of clients were lost with their machine") from error
        if not breaks_device(error.cause):
            raise error.cause from error  # what the host raised, with its traceback there
        return
    if not isinstance(error, (*_LOST_HOST, ray.exceptions.ObjectLostError)):
        raise error


def _blocks(clients: tuple[ClientIndex, ...], size: int) -> list[tuple[ClientIndex, ...]]:
    """Return the clients in blocks that are trained at once, the same blocks for any number of hosts."""
    return [clients[first : first + size] for first in range(0, len(clients), size)]


def _kept(state: Message) -> Any:
    """Return a state as `RayStates` keeps it."""
    if state.nbytes > SMALL_BYTES:
        return ray.put(state)
    # a view would keep the object that the state arrived in, and so the sum of the models of a chunk
    return state._replace(tensors=[(data.copy(), dtype, shape) for data, dtype, shape in state.tensors])
