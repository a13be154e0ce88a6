"""The interface of metrics: measurements besides accuracy and loss, switched on as `metrics.NAME` with their options.

A metric measures one of four things: a model's predictions on one part of a client's data, its representations of many
clients' data, its gradients, or its changes by local training. Each kind has a base class. Metrics measure the models,
splits and clients that are scored in any case (`evaluate.*`), every `every` rounds and after the last round. They never
change the outcome of a simulation.
"""

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from rayfed.core.errors import BadHook
from rayfed.core.options import option
from rayfed.core.outputs import Kind
from rayfed.core.task import InputSpec

OF_CLASSES: tuple[Kind, ...] = ("classes", "binary", "positions")
EVERY = "rounds between measurements; the last round is always measured, and by default only the last"
EVERY_ROUND = "rounds between measurements; the last round is always measured"


class Value(NamedTuple):
    """One value of a metric, measured on `n` examples.

    If `higher_is_better` is None, the declaration of the metric's class holds.
    """

    metric: str
    value: float
    n: int
    higher_is_better: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """Base class of all metrics. Derive your own from one of the classes below, with its options as fields."""

    higher_is_better: ClassVar[bool | None] = None
    """Whether higher values are better, which decides on the worst client and on the best rounds. None leaves it to
    `select.mode`, or to the name of the value; see `rayfed.core.round_record`."""

    every: int | None = option(None, low=1, help=EVERY)

    def due(self, round: int, last: int) -> bool:
        """Return whether to measure after `round`; `last` is the last round whose models are scored."""
        if round >= last:
            return True
        return self.every is not None and round % self.every == 0

    def declared(self, value: Value) -> Value:
        """Return `value` with Python numbers, and with the class's `higher_is_better` if it has none of its own.

        Raises:
            BadHook: The value is called accuracy or loss.
        """
        if value.metric in ("accuracy", "loss"):
            where = f"{type(self).__name__}.measure"
            raise BadHook(f"{where} returned a value called {value.metric}, as a score of every model; rename it")
        better = value.higher_is_better
        if better is None:
            better = self.higher_is_better
        return Value(value.metric, float(value.value), operator.index(value.n), better)


@dataclass(frozen=True, kw_only=True)
class OfPredictions(Metric):
    """A metric of a model's predictions on one part of one client's data."""

    requires_classes: ClassVar[bool] = True
    """Whether outputs must stand for one of `kinds`. If not, `measure` gets outputs and labels as they are."""
    kinds: ClassVar[tuple[Kind, ...]] = OF_CLASSES
    """What outputs may stand for; see `rayfed.core.outputs`."""

    every: int | None = option(1, low=1, help=EVERY_ROUND)

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        """Return the values for `logits` [n, classes] and the classes `y` [n].

        For a model with one logit o per example, `logits` has the columns 0 and o. Every position counts as an example.
        With several labels, both are [n, labels]; with numbers, both have the shape of the labels.
        """
        raise NotImplementedError

    def values(self, logits: Tensor, y: Tensor) -> list[Value]:
        """Return what `measure` returns, with what the class declares.

        Raises:
            BadHook: `measure` returns something else than values, or one that is called accuracy or loss.
        """
        returned: Any = self.measure(logits, y)
        if not isinstance(returned, Iterable):
            raise _no_values(self, returned)
        values = []
        for value in returned:
            if not isinstance(value, Value):
                raise _no_values(self, value)
            values.append(self.declared(value))
        return values


def _no_values(metric: Metric, returned: Any) -> BadHook:
    """Return the error of a metric whose `measure` returns something else than values; it names the user's line."""
    kind = type(metric)
    code = kind.measure.__code__  # type: ignore[attr-defined]
    place = f"{code.co_filename}, line {code.co_firstlineno}"
    return BadHook(
        f"{kind.__name__}.measure ({place}) returned {type(returned).__name__}; return a list of values, such as "
        '[Value("name", number, len(y))] with rayfed.metrics.base.Value'
    )


@dataclass(frozen=True, kw_only=True)
class OfChangedInputs(Metric):
    """A metric of a model's predictions on inputs that the metric changes, of one part of one client's data."""

    every: int | None = option(1, low=1, help=EVERY_ROUND)

    def check(self, inputs: InputSpec, num_classes: int) -> None:
        """Raise UsageError if inputs of this kind cannot be changed."""

    def changed(self, x: Tensor, y: Tensor, inputs: InputSpec) -> tuple[Tensor, Tensor]:
        """Return the inputs [m, ...] to predict, with their classes [m], for some `x` [n, ...] and `y` [n].

        `inputs` says how x is normalised.
        """
        raise NotImplementedError

    def measure(self, logits: Tensor, y: Tensor) -> Iterable[Value]:
        """Return the values for `logits` [m, classes] of the changed inputs and their classes `y` [m]."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfTraining(Metric):
    """A metric of a client's local training in the last exchange of a round; recorded at the point `trained`."""

    every: int | None = option(1, low=1, help=EVERY_ROUND)

    def measure(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Iterable[tuple[str, float]]:
        """Return (name, value) pairs for the trained parameters that the model has both before and after."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OfGradients(Metric):
    """A metric of the gradients of the mean loss at the server's model, one for each domain.

    Its values are recorded under the first of `splits`.
    """

    splits: list[str] = option(
        ["val", "ood"], choices=("train", "val", "test", "ood"), help="parts of the data to take gradients on"
    )

    def measure(self, gradients: Mapping[str, tuple[Mapping[str, Tensor], int]]) -> Iterable[tuple[str, Value]]:
        """Return (domain, value) pairs from each domain's (gradient, examples); the domain "" stands for all."""
        raise NotImplementedError


class Representations(NamedTuple):
    """The representations `z` [n, d] float32 and the classes `y` [n] of a sample of one part of a client's data.

    Both are on one device. They are outputs of the layer `layer` of the model at `point`.
    """

    client: int
    domain: str
    z: Tensor
    y: Tensor
    split: str = "test"
    point: str = "global"
    layer: str = "features"


@dataclass(frozen=True, kw_only=True)
class OfRepresentations(Metric):
    """A metric of the representations of all scored clients' data, computed on the server."""

    layers: list[str] = option(
        ["features"], help='modules of the network whose outputs are measured; also "head" (its input) and "logits"'
    )
    split: str = option("test", choices=("train", "val", "test", "ood"), help="part of the data")
    examples: int = option(2000, low=2, help="examples in all, equally many of each client that has enough")

    @property
    def splits(self) -> frozenset[str]:
        """The parts of the data whose representations `measure` receives; its values are recorded under `split`."""
        return frozenset({self.split})

    def share(self, groups: int) -> int:
        """Return how many examples to take of each of `groups` clients and test sets."""
        return max(1, self.examples // groups)

    def measure(self, groups: Sequence[Representations], classes: int, seed: int) -> Iterable[tuple[int, str, Value]]:
        """Return (client, domain, value) triples from the representations; the client -1 stands for all."""
        raise NotImplementedError
