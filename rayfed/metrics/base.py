"""What a metric is: a measurement beside accuracy and loss, switched on as `metrics.NAME` with its options.

A metric looks at one of four things, and derives from the class of that name: the predictions of a model on a part of a
client's data, its representations of many clients' data, its gradients there, or what local training did to it. Each is
taken of the models, splits and clients that are scored anyway (`evaluate.*`), after every `every` rounds and after the
last. Metrics never change a simulation's outcome.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.core.options import build, option, suggestion
from rayfed.core.registry import resolve

METRICS = {
    "ece": "rayfed.metrics.calibration:Ece",
    "class_accuracy": "rayfed.metrics.class_accuracy:ClassAccuracy",
    "drift": "rayfed.metrics.drift:Drift",
    "gradient_norm": "rayfed.metrics.gradient_norm:GradientNorm",
    "mdl": "rayfed.metrics.mdl:Mdl",
    "frechet": "rayfed.metrics.frechet:Frechet",
    "client_probe": "rayfed.metrics.client_probe:ClientProbe",
    "head_accuracy": "rayfed.metrics.head_accuracy:HeadAccuracy",
    "tsne": "rayfed.metrics.tsne:Tsne",
}

EVERY = "measure after every so many rounds, and after the last; by default after the last alone"


class Value(NamedTuple):
    """One number that a metric found, and how many examples stand behind it."""

    metric: str
    value: float
    n: int


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Base of all metrics; a user's own derives from one of the classes below, with its options as fields."""

    every: int | None = option(None, low=1, help=EVERY)

    def due(self, round: int, last: int) -> bool:
        """Whether to measure after `round`; `last` is the last one whose models are scored."""
        return round >= last or (self.every is not None and round % self.every == 0)


@dataclass(frozen=True, kw_only=True)
class OfPredictions(Metric):
    """Of a model's predictions on one part of one client's data."""

    every: int | None = option(1, low=1, help="measure after every so many rounds, and after the last")

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        """From `logits` [n, classes] and the classes `y` [n]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfTraining(Metric):
    """Of what a client's local training did, taken in the round's last exchange; recorded at the point `trained`."""

    every: int | None = option(1, low=1, help="measure after every so many rounds, and after the last")

    def measure(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterable[tuple[str, float]]:
        """From the trained parameters that the model has in common before and after."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfGradients(Metric):
    """Of the gradients of the mean loss at the server's model, one for each domain; recorded under the first split."""

    splits: list[str] = option(
        ["val", "ood"], choices=("train", "val", "test", "ood"), help="parts of the data that the gradients are of"
    )

    def measure(self, gradients: Mapping[str, tuple[Mapping[str, Tensor], int]]) -> Iterable[tuple[str, Value]]:
        """From each domain's (gradient, examples); gives (domain, value) pairs, the domain "" for all together."""
        raise NotImplementedError


class Representations(NamedTuple):
    """What a model makes of a part of a client's data: `z` [n, d] float32 and the classes `y` [n], on one device."""

    client: int
    domain: str
    z: Tensor
    y: Tensor
    split: str = "test"


@dataclass(frozen=True, kw_only=True)
class OfRepresentations(Metric):
    """Of the representations that all scored clients' models have of their data, brought together on the server."""

    layers: list[str] = option(
        ["features"], help='modules of the network whose outputs are measured; also "head" (its input) and "logits"'
    )
    split: str = option("test", choices=("train", "val", "test", "ood"), help="part of the data")
    examples: int = option(2000, low=2, help="examples in all, the same number of each client where it has as many")

    @property
    def splits(self) -> frozenset[str]:
        """All parts of the data whose representations `measure` wants; its values are recorded under `split`."""
        return frozenset({self.split})

    def share(self, groups: int) -> int:
        """How many examples of each of `groups` clients and test sets are looked at."""
        return max(1, self.examples // groups)

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        """From the clients' representations of `splits`; gives (client, domain, value), client -1 for all together."""
        raise NotImplementedError


def build_metrics(chosen: Any) -> dict[str, Metric]:
    """The metrics that are switched on: `chosen` maps names to options, or to true (the defaults) or false (off).

    Raises:
        UsageError: an unknown name, or an option that is unknown, of a wrong type or out of range.
    """
    if not isinstance(chosen, Mapping):
        names = ", ".join(map(str, chosen)) if isinstance(chosen, list) else chosen
        raise UsageError(f"metrics={names}: expected a group, as metrics.ece=true or metrics.ece.every=5")
    made = {}
    for name, options in chosen.items():
        if options is False or options is None:
            continue
        if options is not True and not isinstance(options, Mapping):
            raise UsageError(f"metrics.{name}={options!r}: expected true, or a group with options such as every")
        if name not in METRICS and ":" not in name:
            own = "your own is written metrics.module:Name"
            raise UsageError(f"metrics.{name}: no such metric; {suggestion(name, METRICS, prefix='metrics.')}; {own}")
        found = resolve(name, METRICS, where=f"metrics.{name}")
        if not (isinstance(found, type) and issubclass(found, Metric)):
            raise UsageError(f"metrics.{name}: must be a dataclass that derives from a class of rayfed.metrics.base")
        made[name] = build(found, {} if options is True else options, where=f"metrics.{name}")
    return made


def generator(seed: int) -> torch.Generator:
    """torch's generator for a metric's own draws, apart from the simulation's."""
    return torch.Generator().manual_seed(seed)
