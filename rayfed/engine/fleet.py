"""What the server asks of its hosts, wherever clients run, and what they return."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, TypeVar

from rayfed.algorithm import Reply, State
from rayfed.core.exact_sum import ExactSum
from rayfed.core.ids import ClientIndex, Moment
from rayfed.core.round_record import Score
from rayfed.data.population import SPLITS, Population
from rayfed.engine.client_store import ClientStates
from rayfed.engine.scoring import NO_METRICS, DueMetrics, Gradients, Scored

States = Mapping[ClientIndex, State]
"""The states of clients, or further fields for single clients."""
Versions = Mapping[int, State]
"""What clients that train ahead of the clock have received, by the round in which they started."""
_Key = TypeVar("_Key")
_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, kw_only=True)
class Request:
    """The clients that hosts run, and when.

    Attributes:
        moment: The exchange during or after which the clients are run; it keys their random streams.
        cohort: All clients that take part, on any host, in ascending order.
        clients: The clients to run. The server asks for all of them, and a fleet deals them to its hosts.
        metrics: The metrics to take besides accuracy and loss.
        vmap_clients: The number of clients that a host trains at once, or the largest number to measure. Fleets set it.
        origins: Of clients that train ahead of the clock: when each has started, and who with it. They have received
            `Versions`. The fleet keeps what they return until `weigh` and `commit`.
    """

    moment: Moment
    cohort: Sequence[ClientIndex]
    clients: tuple[ClientIndex, ...]
    metrics: DueMetrics = NO_METRICS
    vmap_clients: int = 1
    origins: Mapping[ClientIndex, tuple[Moment, tuple[ClientIndex, ...]]] = field(default_factory=dict)

    def part(self, clients: Iterable[ClientIndex]) -> Self:
        """Return the same request for `clients`."""
        return replace(self, clients=tuple(clients))

    def origin(self, client: ClientIndex) -> tuple[Moment, tuple[ClientIndex, ...]]:
        """Return when a client has started, and who started with it."""
        return self.origins.get(client) or (self.moment, tuple(self.cohort))


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
        part = super().part(clients)
        before = {}
        for i in part.clients:
            if i in self.models_before:
                before[i] = self.models_before[i]
        weights = {i: self.weights[i] for i in part.clients}
        return replace(part, weights=weights, models_before=before)


@dataclass(frozen=True, kw_only=True)
class ScoreRequest(Request):
    """A request to score models on the clients' own data.

    Attributes:
        splits: The parts of the clients' data to score on.
        points: The points to score: "downloaded" and "adapted" of what clients download.
        adapt_epochs: The epochs of local training before scoring at "adapted".
        tests: The server's test sets to score the global model on, by their position.
        client_tests: The server's test sets to score each client's downloaded model on.
        blocks: The clients in the blocks of `scoring_blocks`. A fleet sets them where it deals them to several hosts.
    """

    splits: tuple[str, ...]
    points: tuple[str, ...] = ()
    adapt_epochs: int = 0
    tests: tuple[int, ...] = ()
    client_tests: tuple[int, ...] = ()
    blocks: tuple[tuple[ClientIndex, ...], ...] = ()


_BLOCK_CLIENTS = 64
_BLOCK_EXAMPLES = 2**11  # so that few clients with many examples are still dealt to several hosts


def scored_examples(population: Population, clients: Sequence[ClientIndex], splits: Iterable[str]) -> list[int]:
    """Return the number of examples that each of `clients` has on `splits`."""
    columns = [SPLITS.index(split) for split in splits if split in SPLITS]
    sizes = population.clients.sizes[list(clients)]
    examples: list[int] = sizes[:, columns].sum(1).tolist()
    return examples


def scoring_blocks(population: Population, request: ScoreRequest) -> tuple[tuple[ClientIndex, ...], ...]:
    """Return the clients of `request` in blocks that share batches where the server's model is scored.

    The rounding of an example's output depends on its batch. So blocks follow from the clients and their examples
    alone, and a host scores whole blocks: where clients are scored changes no bit.
    """
    blocks = list[tuple[ClientIndex, ...]]()
    block = list[ClientIndex]()
    size = 0
    examples = scored_examples(population, request.clients, request.splits)
    for client, count in zip(request.clients, examples, strict=True):
        if block and (len(block) == _BLOCK_CLIENTS or size + count > _BLOCK_EXAMPLES):
            blocks.append(tuple(block))
            block = []
            size = 0
        block.append(client)
        size += count
    if block:
        blocks.append(tuple(block))
    return tuple(blocks)


@dataclass(kw_only=True)
class ExchangeResult:
    """What an exchange with a host's clients, or with all clients, leaves for the server and its fleet.

    Attributes:
        total: The weighted sum of the averaged fields of all clients, which a fleet adds up; empty where the server
            weighs the replies first.
        replies: The other fields of every client.
        models_before: The models before training that a later exchange of the round needs, see `ExchangeRequest`.
        training: Scores of the training itself: its metrics, and the means of `step`'s metrics over its steps.
        scored: The scores of the locally trained models.
        sent: The bytes that each client sent, by field.
        busy: The seconds that each host worked, by its position.
        scoring: The seconds of `busy` spent on scores and metrics.
        predicted: The seconds that each host was predicted to work; None where nothing was measured before.
        gpu_bytes: The most GPU memory that tensors of a host took since its last exchange; 0 on CPUs.
        states: The next state of every client, which the fleet keeps.
        unweighted: Each client's averaged fields, where the server weighs the replies first. The fleet keeps them until
            then.
    """

    total: ExactSum = field(default_factory=ExactSum)
    replies: list[Reply] = field(default_factory=list)
    models_before: dict[ClientIndex, Any] = field(default_factory=dict)
    training: list[Score] = field(default_factory=list)
    scored: Scored = field(default_factory=Scored)
    sent: dict[ClientIndex, dict[str, int]] = field(default_factory=dict)
    busy: dict[int, float] = field(default_factory=dict)
    scoring: dict[int, float] = field(default_factory=dict)
    predicted: Mapping[int, float] | None = None
    gpu_bytes: int = 0
    states: dict[ClientIndex, State] = field(default_factory=dict)
    unweighted: dict[ClientIndex, State] = field(default_factory=dict)

    def add(self, other: "ExchangeResult") -> None:
        """Add what other clients left for the server, apart from the total."""
        self.replies += other.replies
        self.models_before |= other.models_before
        self.training += other.training
        self.scored.add(other.scored)
        self.sent |= other.sent
        add_to(self.busy, other.busy)
        add_to(self.scoring, other.scoring)
        self.gpu_bytes = max(self.gpu_bytes, other.gpu_bytes)


def add_to(sums: dict[_Key, _Number], terms: Mapping[_Key, _Number]) -> None:
    """Add each of `terms` to the sum of the same key."""
    for key, term in terms.items():
        if key in sums:
            sums[key] = sums[key] + term
        else:
            sums[key] = term


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

    def exchange(self, request: ExchangeRequest, down: State | Versions, unicast: States) -> ExchangeResult: ...
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
