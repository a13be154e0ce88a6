"""All hosts behind one interface: the server makes the same calls wherever clients run."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from rayfed.algorithm import State
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import owned
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.client_store import ClientStates, ClientStore
from rayfed.engine.device import room_for_states
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Host
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, ScoreRequest, States
from rayfed.engine.scoring import Gradients, Scored

CLIENTS_AT_ONCE = 64
"""Clients whose states `LocalFleet` holds beside its store at any time."""
_Request = TypeVar("_Request", bound=Request)


class Fleet(Protocol):
    """What the server asks of its hosts; see `Host` for the methods.

    A fleet owns the states of clients. An exchange reads them, and writes the next ones when all of its clients have
    finished. Where the server weighs the replies, it then calls `weigh`, once for each client. `commit` writes the next
    states of clients that train ahead of the clock.

    Attributes:
        vmap_clients: The number of clients that a host trains at once; None until `choose_vmap_clients`.
    """

    vmap_clients: int | None

    @property
    def states(self) -> ClientStates:
        """The states of the clients that have one."""

    def choose_vmap_clients(self, request: Request, down: State, unicast: States) -> None:
        """Have a host measure `vmap_clients`, so that there is a block for each host; see `Host.fastest_width`."""

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult: ...
    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum: ...

    def commit(self, clients: Iterable[ClientIndex]) -> None:
        """Write the next states of clients that trained ahead of the clock."""

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States) -> Scored: ...
    def score_global(self, request: ScoreRequest, model: Any) -> Scored: ...
    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]: ...

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        """Replace all states."""

    def take_traffic(self) -> tuple[int, int]:
        """Return the bytes of tensors that went to processes of hosts, and that came back, since the last call."""


class LocalFleet:
    """One host in this process, without Ray, so that a debugger works.

    Args:
        gpus: The GPUs that the process reserved; a share below 1 limits the memory that the host's data may take.
        state_memory: The bytes that the clients' states may take in memory, beside those on the GPU; the rest is on
            disk.
    """

    def __init__(
        self,
        blueprint: Blueprint,
        population: Population,
        device: str | torch.device = "cpu",
        *,
        gpus: float = 0.0,
        state_memory: float = math.inf,
    ):
        share = min(gpus, 1.0) or 1.0
        self.host = Host(blueprint, population, device, share=share)
        self.states = ClientStore(state_memory, device, device_memory=room_for_states(device, share))
        self._unweighted: dict[ClientIndex, State] = {}
        self._ahead: dict[ClientIndex, State] = {}
        self.vmap_clients = blueprint.vmap_clients

    def choose_vmap_clients(self, request: Request, down: State, unicast: States) -> None:
        self.vmap_clients = self.host.fastest_width(request, down, unicast, self._states_of(request.clients))

    def exchange(self, request: ExchangeRequest, down: State, unicast: States) -> ExchangeResult:
        result = ExchangeResult(total=self.host.empty_sum())
        for part in self._parts(request):
            done = self.host.exchange(part, down, unicast, self._states_of(part.clients), result.total)
            self._ahead |= {client: owned(state) for client, state in done.states.items()}
            if not request.origins:
                self.commit(done.states)
            self._unweighted |= owned(done.unweighted)
            result.add(done)
        return result

    def weigh(self, weights: Mapping[ClientIndex, float]) -> ExactSum:
        return self.host.weigh((self._unweighted.pop(client), weight) for client, weight in weights.items())

    def commit(self, clients: Iterable[ClientIndex]) -> None:
        for client in clients:
            self.states[client] = self._ahead.pop(client)

    def score_downloads(self, request: ScoreRequest, down: State, unicast: States) -> Scored:
        scored = Scored()
        for part in self._parts(request):
            scored.add(self.host.score_downloads(part, down, unicast, self._states_of(part.clients)))
        return scored

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self.host.score_global(request, model)

    def gradients(self, request: ScoreRequest, model: Any) -> list[Gradients]:
        return self.host.gradients(request, model)

    def load(self, states: Iterable[tuple[ClientIndex, State]]) -> None:
        self.states.clear()
        for client, state in states:
            self.states[client] = self.host.ctx.task.to_memory_format(state)

    def take_traffic(self) -> tuple[int, int]:
        return 0, 0

    def _parts(self, request: _Request) -> Iterator[_Request]:
        width = self.vmap_clients or 1
        request, size = replace(request, vmap_clients=width), max(1, CLIENTS_AT_ONCE // width) * width
        return (request.part(request.clients[k : k + size]) for k in range(0, len(request.clients), size))

    def _states_of(self, clients: Sequence[ClientIndex]) -> dict[ClientIndex, State]:
        return {client: self.states[client] for client in clients if client in self.states}
