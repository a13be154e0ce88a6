"""What the server asks of hosts, and what they return."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from rayfed.algorithm import Reply
from rayfed.core.ids import ClientIndex
from rayfed.core.moment import Moment
from rayfed.core.records import Score
from rayfed.engine.exact_sum import ExactSum
from rayfed.engine.metric_collection import NO_METRICS, CollectedRepresentations, DueMetrics


@dataclass(frozen=True, kw_only=True)
class Request:
    """The clients that a host runs, and when.

    Attributes:
        moment: The exchange during or after which the clients are run; it keys their random streams.
        cohort: All clients that take part, on any host, in ascending order.
        clients: The clients of this host, in ascending order.
        metrics: The metrics to take besides accuracy and loss.
    """

    moment: Moment
    cohort: tuple[ClientIndex, ...]
    clients: tuple[ClientIndex, ...]
    metrics: DueMetrics = NO_METRICS

    def for_clients(self, clients: Collection[ClientIndex]) -> Self:
        """Return the same request for some of its clients."""
        return replace(self, clients=tuple(i for i in self.clients if i in clients))


@dataclass(frozen=True, kw_only=True)
class ExchangeRequest(Request):
    """A request to train clients.

    Attributes:
        weights: Each client's weight in the sum of averaged fields.
        score_splits: The splits on which to score the locally trained models; empty to score none.
    """

    weights: Mapping[ClientIndex, float]
    score_splits: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """A request to score models on the clients' own data.

    Attributes:
        splits: The parts of the clients' data to score on.
        points: The points to score: "downloaded" and "adapted" of what clients download.
        adapt_epochs: The epochs of local training before scoring at "adapted".
    """

    splits: tuple[str, ...]
    points: tuple[str, ...] = ()
    adapt_epochs: int = 0


@dataclass(frozen=True, kw_only=True)
class ExchangeResult:
    """What a host returns from an exchange.

    Attributes:
        total: The weighted sum of the averaged fields; empty where the server weighs the replies first.
        replies: The other fields of every client.
        metrics: Scores of the training itself: the metrics of it, and the means of `step`'s metrics over its steps.
        bytes_up: Bytes sent by all clients together, by field.
        scores: Scores of the locally trained models.
        collected: Representations collected for metrics.
        seconds: The wall-clock time of the whole exchange.
        seconds_scoring: The part of it spent on scores and metrics.
    """

    total: Any = field(default_factory=ExactSum)
    replies: Sequence[Reply]
    metrics: Sequence[Score]
    bytes_up: Mapping[str, int]
    scores: Sequence[Score]
    collected: Sequence[CollectedRepresentations]
    seconds: float
    seconds_scoring: float
