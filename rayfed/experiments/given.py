"""What a user gives in Python in place of parts of the configuration."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from rayfed.data.population import Client
from rayfed.data.user_clients import Clients
from rayfed.experiments.plan_model import ModelFactory
from rayfed.losses.base import Loss


@dataclass(frozen=True, kw_only=True)
class Given:
    """What was given in Python in place of parts of the configuration; see `make_plan`."""

    clients: Sequence[Client | Mapping[str, Any]] | Clients | None = None
    model: ModelFactory | nn.Module | None = None
    loss: Loss | None = None
    num_classes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.clients, Iterable) and not isinstance(self.clients, (Mapping, str)):
            object.__setattr__(self, "clients", tuple(self.clients))  # they are read several times

    def __bool__(self) -> bool:
        return any(value is not None for value in vars(self).values())
