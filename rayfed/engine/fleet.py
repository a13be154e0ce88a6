"""All hosts behind one interface: the server makes the same calls wherever the clients live."""

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch

from rayfed.algorithm import State
from rayfed.core.ids import ClientIndex
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Host
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import Gradients
from rayfed.engine.requests import ExchangeRequest, ExchangeResult, Request, ScoreRequest


class Fleet(Protocol):
    """What the server asks of its hosts; see `Host` for the methods."""

    def exchange(
        self, request: ExchangeRequest, down: State, unicast: Mapping[ClientIndex, State]
    ) -> list[ExchangeResult]: ...

    def weigh(self, weights: Mapping[ClientIndex, float]) -> list[ExactSum]: ...

    def score_downloads(self, request: ScoreRequest, down: State, unicast: Mapping[ClientIndex, State]) -> Scored: ...

    def score_global(self, request: ScoreRequest, model: Any) -> Scored: ...

    def gradients(self, request: Request, model: Any, splits: Collection[str]) -> list[Gradients]: ...

    def save(self) -> dict[ClientIndex, State]: ...

    def load(self, states: Mapping[ClientIndex, State]) -> None: ...

    def close(self) -> None: ...


class LocalFleet:
    """One host in this process, without Ray, so that a debugger works.

    Args:
        gpus: The GPUs that the process reserved; a share below 1 limits the memory that the host's data may take.
    """

    def __init__(
        self, blueprint: Blueprint, population: Population, device: str | torch.device = "cpu", *, gpus: float = 0.0
    ):
        clients = [ClientIndex(i) for i in range(len(population.clients))]
        share = min(gpus, 1.0) or 1.0
        self.host = Host.of(blueprint, population, device, clients, range(len(population.tests)), share=share)

    def exchange(
        self, request: ExchangeRequest, down: State, unicast: Mapping[ClientIndex, State]
    ) -> list[ExchangeResult]:
        return [self.host.exchange(request, down, unicast)]

    def weigh(self, weights: Mapping[ClientIndex, float]) -> list[ExactSum]:
        return [self.host.weigh(weights)]

    def score_downloads(self, request: ScoreRequest, down: State, unicast: Mapping[ClientIndex, State]) -> Scored:
        return self.host.score_downloads(request, down, unicast)

    def score_global(self, request: ScoreRequest, model: Any) -> Scored:
        return self.host.score_global(request, model)

    def gradients(self, request: Request, model: Any, splits: Collection[str]) -> list[Gradients]:
        return self.host.gradients(request, model, splits)

    def save(self) -> dict[ClientIndex, State]:
        return self.host.save()

    def load(self, states: Mapping[ClientIndex, State]) -> None:
        self.host.load(states)

    def close(self) -> None:
        """Release nothing."""
