"""All hosts behind one face: the server's calls are the same wherever the clients live. This one is in-process."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from rayfed.algorithm import State
from rayfed.data.population import Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.host import Answer, Host
from rayfed.engine.host_data import Scored
from rayfed.engine.metric_collection import DueMetrics, Gradients


class Fleet(Protocol):
    """What the server asks of its hosts; the arguments are those of `Host`."""

    def exchange(
        self,
        ids: Sequence[int],
        down: State,
        own: Mapping[int, State],
        weights: Mapping[int, float],
        now: Mapping[str, Any],
        score_trained: Sequence[str],
        measures: DueMetrics,
    ) -> list[Answer]: ...

    def weigh(self, weights: Mapping[int, float]) -> list[ExactSum]: ...

    def score_downloads(
        self,
        ids: Sequence[int],
        down: State,
        own: Mapping[int, State],
        now: Mapping[str, Any],
        points: Sequence[str],
        splits: Sequence[str],
        adapt: int,
        measures: DueMetrics,
    ) -> Scored: ...

    def score_global(
        self, ids: Sequence[int], model: Any, now: Mapping[str, Any], splits: Sequence[str], measures: DueMetrics
    ) -> Scored: ...

    def gradients(
        self, ids: Sequence[int], model: Any, now: Mapping[str, Any], splits: Collection[str]
    ) -> list[Gradients]: ...

    def save(self) -> dict[int, State]: ...

    def load(self, states: Mapping[int, State]) -> None: ...

    def close(self) -> None: ...


class LocalFleet:
    """hosts=0: one host in this process. A debugger works, and Ray is not even imported.

    `gpus` is what the process reserved: below 1 it keeps to that share of the GPU's memory.
    """

    def __init__(
        self, blueprint: Blueprint, population: Population, device: str | torch.device = "cpu", *, gpus: float = 0.0
    ):
        everyone, tests = range(len(population.clients)), range(len(population.tests))
        self.host = Host.of(blueprint, population, device, everyone, tests, share=min(gpus, 1.0) or 1.0)

    def exchange(self, *args: Any) -> list[Answer]:
        return [self.host.exchange(*args)]

    def weigh(self, weights: Mapping[int, float]) -> list[ExactSum]:
        return [self.host.weigh(weights)]

    def score_downloads(self, *args: Any) -> Scored:
        return self.host.score_downloads(*args)

    def score_global(self, *args: Any) -> Scored:
        return self.host.score_global(*args)

    def gradients(self, *args: Any) -> list[Gradients]:
        return self.host.gradients(*args)

    def save(self) -> dict[int, State]:
        return self.host.save()

    def load(self, states: Mapping[int, State]) -> None:
        self.host.load(states)

    def close(self) -> None:
        """Nothing to release."""
