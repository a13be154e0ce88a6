"""Small federations for tests: quadratics with known solutions, and blobs with a small network."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Phase
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.optim import SGD, Optimizer
from rayfed.core.round_record import Record
from rayfed.data.population import SPLITS, Client, Examples, Population
from rayfed.engine.blueprint import Blueprint
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Evaluation, Server
from rayfed.experiments.checks import check_trial


class Maps(nn.Module):
    """A network with features of shape [2, 4], which are not vectors."""

    feature_shape = (2, 4)

    def __init__(self):
        super().__init__()
        self.body, self.fc = nn.Linear(6, 8), nn.Linear(8, 3)

    def features(self, x):
        return self.body(x).view(-1, 2, 4)

    def head(self, features):
        return self.fc(features.flatten(1))

    def forward(self, x):
        return self.head(self.features(x))


class Net(nn.Module):
    """Two layers with batch norm, then a linear head: 6 inputs, 8 features, 3 classes."""

    feature_shape = (8,)

    def __init__(self, batch_norm: bool = True):
        super().__init__()
        norm = nn.BatchNorm1d(12) if batch_norm else nn.Identity()
        self.body = nn.Sequential(nn.Linear(6, 12), norm, nn.ReLU(), nn.Linear(12, 8), nn.ReLU())
        self.fc = nn.Linear(8, 3)

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)

    def head(self, features: Tensor) -> Tensor:
        return self.fc(features)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


class Adapter(nn.Module):
    """A frozen linear layer with a low-rank adapter, in the form and under the names of peft's."""

    def __init__(self, layer: nn.Linear, rank: int = 4, alpha: float = 8.0):
        super().__init__()
        self.base_layer, self.scaling = layer.requires_grad_(False), {"default": alpha / rank}
        self.lora_A = nn.ModuleDict({"default": nn.Linear(layer.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, layer.out_features, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scaling["default"] * self.lora_B["default"](self.lora_A["default"](x))


def adapted(model: Net) -> Net:
    """Return `model` with an adapter of its first layer."""
    torch.manual_seed(1)
    model.body[0] = Adapter(model.body[0])
    return model


@dataclass(frozen=True, kw_only=True)
class Busy(FedAvg):
    """FedAvg whose step takes 2 ms of the CPU for any number of clients."""

    def step(self, ctx, work, down, batch):
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return super().step(ctx, work, down, batch)


class Point(nn.Module):
    """One parameter w and no input: for quadratics f_i(w) = h_i/2 (w − a_i)²."""

    feature_shape = (1,)

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def features(self, x: Tensor) -> Tensor:
        return self.w.expand(len(x), 1)

    def head(self, features: Tensor) -> Tensor:
        return features

    def forward(self, x: Tensor) -> Tensor:
        return self.features(x)


def quadratic(w: Tensor, target: Tensor) -> Tensor:
    """Mean of h/2 (w − a)² with target rows (h, a)."""
    return (target[:, 0] / 2 * (w[:, 0] - target[:, 1]) ** 2).mean()


def quadratics(*curves: tuple[float, float], copies: int = 1) -> Population:
    """One client per (h, a), each with `copies` equal examples."""

    def examples(h: float, a: float, n: int) -> Examples:
        return Examples(np.zeros((n, 1), np.float32), np.tile(np.array([[h, a]], np.float32), (n, 1)))

    clients = [
        Client(i, f"d{i}", examples(h, a, copies), examples(h, a, 0), examples(h, a, 1))
        for i, (h, a) in enumerate(curves)
    ]
    return Population("quadratics", tuple(clients), 1, (1,))


def blobs(clients: int = 4, *, sizes: Sequence[int] = (20, 26, 33, 41), seed: int = 0) -> Population:
    """Gaussian classes in six dimensions, each client's shifted; training sizes cycle through `sizes`."""
    rng = np.random.default_rng(seed)
    centres = rng.normal(size=(3, 6)) * 2

    def draw(n: int, shift: np.ndarray) -> Examples:
        y = rng.integers(0, 3, n)
        return Examples((centres[y] + shift + rng.normal(size=(n, 6))).astype(np.float32), y.astype(np.int64))

    made = []
    for i in range(clients):
        shift = rng.normal(size=6)
        made.append(Client(i, f"d{i % 2}", draw(sizes[i % len(sizes)], shift), draw(9, shift), draw(15, shift)))
    return Population("blobs", tuple(made), 3, (6,))


def as_mappings(population: Population, kind: Callable[[Any], Any] = np.asarray) -> list[dict[str, Any]]:
    """The clients as users give them: each part as a pair of inputs and labels of a kind of array, and the domain."""

    def parts(client: Client) -> dict[str, Any]:
        return {name: (kind(part.x), kind(part.y)) for name, part in zip(SPLITS, client.parts, strict=True)}

    return [{"domain": client.domain, **parts(client)} for client in population.clients]


def with_inputs(population: Population, change: Callable[[Any], Any], **others: Any) -> Population:
    """The same people with `change(x)` for the inputs of every part; `others` are attributes of the population."""

    def part(examples: Examples) -> Examples:
        return Examples(change(examples.x), examples.y)

    clients = [replace(c, train=part(c.train), val=part(c.val), test=part(c.test)) for c in population.clients]
    return replace(population, clients=tuple(clients), **others)


def reshaped(population: Population, shape: tuple[int, ...]) -> Population:
    """The same people with every input in another shape."""
    return with_inputs(population, lambda x: x.reshape(-1, *shape), shape=shape)


def on_pictures(model: Net) -> Net:
    """`model` for inputs of any shape with as many values."""
    model.body = nn.Sequential(nn.Flatten(), *model.body)
    return model


def net(batch_norm: bool = True, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net(batch_norm)


def blueprint(algorithm: Algorithm, population: Population, **changes: Any) -> Blueprint:
    """A blueprint with small defaults: SGD 0.05, batches of 5, one epoch, two rounds, everyone, seed 0."""
    optimizer: Optimizer = SGD(lr=0.05)
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "model": changes.pop("model", None) or net(),
        "loss": F.cross_entropy,
        "batch_norm": "aggregate",
        "optimizer": optimizer,
        "local": Phase("train", epochs=1),
        "batch_size": 5,
        "drop_last": True,
        "rounds": 2,
        "cohort": len(population.clients),
        "seed": 0,
    }
    return Blueprint(**(values | changes))


def new_server(plan: Blueprint, population: Population, fleet: LocalFleet | None = None, **evaluation: Any) -> Server:
    """Return a server before its first round; its clients are in this process."""
    return Server(plan, population, fleet or LocalFleet(plan, population), Evaluation(**evaluation))


def simulate(
    plan: Blueprint, population: Population, *, points: Sequence[str] = (), every: int = 1
) -> tuple[Server, list[Record]]:
    """Runs `plan` to its end in this process; returns the server and its records."""
    check_trial(plan, population)
    points = tuple(points) or (plan.algorithm.traits.default_eval_point,)
    server = new_server(plan, population, every=every, points=points)
    return server, list(server.run())
