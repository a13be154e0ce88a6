"""What the server asks of hosts, and what they return."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from rayfed.algorithm import Reply
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.records import Score
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.metric_collection import NO_METRICS, DueMetrics
from rayfed.metrics.base import Representations

Key = TypeVar("Key")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The clients that hosts run, and when.

    Attributes:
        moment: The exchange during or after which the clients are run; it keys their random streams.
        cohort: All clients that take part, on any host, in ascending order.
        clients: The clients to run. The server asks for all of them, and a fleet deals them to its hosts.
        metrics: The metrics to take besides accuracy and loss.
        vmap_clients: The number of clients that a host trains at once; fleets fill it in. At most so many where
            it is measured.
    """

    moment: Moment
    cohort: Sequence[ClientIndex]
    clients: tuple[ClientIndex, ...]
    metrics: DueMetrics = NO_METRICS
    vmap_clients: int = 1

    def part(self, clients: Iterable[ClientIndex]) -> Self:
        """Return the same request for `clients`."""
        return replace(self, clients=tuple(clients))


@dataclass(frozen=True, kw_only=True)
class ExchangeRequest(Request):
    """A request to train clients.

    Attributes:
        weights: Each client's weight in the sum of averaged fields.
        score_splits: The splits on which to score the locally trained models; empty to score none.
        models_before: The clients' models before the first exchange of the round, where a metric compares them with
            the models after the last one.
    """

    weights: Mapping[ClientIndex, float]
    score_splits: tuple[str, ...] = ()
    models_before: Mapping[ClientIndex, Any] = field(default_factory=dict)

    def part(self, clients: Iterable[ClientIndex]) -> Self:
        """Return the same request for `clients`."""
        some = super().part(clients)
        return replace(
            some,
            weights={i: self.weights[i] for i in some.clients},
            models_before={i: self.models_before[i] for i in some.clients if i in self.models_before},
        )


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """A request to score models on the clients' own data.

    Attributes:
        splits: The parts of the clients' data to score on.
        points: The points to score: "downloaded" and "adapted" of what clients download.
        adapt_epochs: The epochs of local training before scoring at "adapted".
        tests: The server's test sets to score the global model on, by their position.
        client_tests: Those to score each client's downloaded model on.
    """

    splits: tuple[str, ...]
    points: tuple[str, ...] = ()
    adapt_epochs: int = 0
    tests: tuple[int, ...] = ()
    client_tests: tuple[int, ...] = ()


@dataclass
class Scored:
    """The scores of some models, and the representations collected for the metrics that the server computes."""

    scores: list[Score] = field(default_factory=list)
    collected: list[Representations] = field(default_factory=list)

    def add(self, other: "Scored") -> None:
        """Append what `other` has."""
        self.scores += other.scores
        self.collected += other.collected


@dataclass(kw_only=True)
class ExchangeResult:
    """What an exchange with some of the clients, or with all of them, leaves for the server.

    Attributes:
        total: The weighted sum of the averaged fields; empty where the server weighs the replies first.
        replies: The other fields of every client.
        models_before: The models before training that a later exchange of the round needs, see `ExchangeRequest`.
        training: Scores of the training itself: the metrics of it, and the means of `step`'s metrics over its steps.
        scored: What was measured of the locally trained models.
        bytes_up: Bytes sent by all clients together, by field.
        busy: The seconds that each host worked, by its position.
        scoring: The part of them spent on scores and metrics.
        predicted: The seconds that each host was predicted to work; None where nothing was measured before.
        gpu_bytes: The most GPU memory that tensors of one host took since its last exchange; 0 on CPUs.
    """

    total: ExactSum = field(default_factory=ExactSum)
    replies: list[Reply] = field(default_factory=list)
    models_before: dict[ClientIndex, Any] = field(default_factory=dict)
    training: list[Score] = field(default_factory=list)
    scored: Scored = field(default_factory=Scored)
    bytes_up: dict[str, int] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    scoring: dict[int, float] = field(default_factory=dict)
    predicted: Mapping[int, float] | None = None
    gpu_bytes: int = 0

    def add(self, other: "ExchangeResult") -> None:
        """Add what other clients left; `other` must not be used afterwards."""
        self.total.merge(other.total)
        self.replies += other.replies
        self.models_before |= other.models_before
        self.training += other.training
        self.scored.add(other.scored)
        add_to(self.bytes_up, other.bytes_up)
        add_to(self.busy, other.busy)
        add_to(self.scoring, other.scoring)
        self.gpu_bytes = max(self.gpu_bytes, other.gpu_bytes)


def add_to(sums: dict[Key, Number], terms: Mapping[Key, Number]) -> None:
    """Add each of `terms` to the sum of the same key."""
    for key, term in terms.items():
        sums[key] = sums[key] + term if key in sums else term
