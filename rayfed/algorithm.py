"""The one interface that an algorithm implements.

State lives in four places and nowhere else; each is a dict of named trees of tensors:

  server    one, kept between rounds by the server
  client    one per client, kept between rounds where the client lives; never sent
  down, up  what crosses the network; the bytes of every field are counted
  work      scratch of one client for one exchange, then gone

Hooks take state and return new state. They change nothing that they are given, with one exception: `work` is the
engine's private copy for that client, and `step` and `finish` may change it in place. An algorithm object holds
hyperparameters only: it is a frozen dataclass whose fields are declared with `rayfed.core.options.option`.

A round is one exchange (or `trips` of them): broadcast → start → step, step, … → finish → aggregate. All sampled
clients take part; before the first round and after the last, `setup_exchanges` and `final_exchanges` reach everyone.

Unseen clients, clients that took no part, may join when all is over. Each of them `join`s, goes through the setup exchanges
as the server's last state broadcasts them (what it sends is dropped), downloads, and is scored before and after local
training. Its number is not below `task.num_clients`, so tables by client have no place for it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from rayfed.core.optim import Optimizer
from rayfed.core.task import Batch, Task

State = dict[str, Any]


class Phase(NamedTuple):
    """A stretch of local training inside an exchange: so many epochs, or so many steps, of batches of client data."""

    name: str
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None  # by default what the configuration says


class Reply(NamedTuple):
    """What one client sent: its number, its training examples, and the fields that are not averaged."""

    client: int
    examples: int
    up: State


class Replies(NamedTuple):
    """All that came back in an exchange: `mean` of every averaged field, and each client's reply in client order."""

    mean: State
    each: Sequence[Reply]


class ClientData(NamedTuple):
    """A client's own data; each part has `len()`, `y` and `batches(size, rows=None) -> Batch, Batch, …`."""

    train: Any
    val: Any
    augmented: Any = None  # the training part with its inputs augmented, where training batches are

    @property
    def as_trained(self) -> Any:
        """The training part as local training sees it: augmented where that is on, by draws of this exchange's own.

        What `prepare` makes of training batches is not in it.
        """
        return self.train if self.augmented is None else self.augmented


NO_DATA = ClientData(None, None)


class Privacy(NamedTuple):
    """ε of differential privacy, and of what: it hides one `unit` of the data, say a record or all of a client's."""

    epsilon: float
    unit: str


@dataclass
class Context:
    """What a hook may know besides state; the engine's to write, the hooks' to read.

    `client`, `examples` and `data` are those of the client at hand, where there is one: `step` may run many clients at
    once, so what it needs to know of its client belongs into `work`.
    """

    task: Task
    optimizer: Optimizer
    batch_size: int
    local: Phase  # the local training that the configuration asks for
    rounds: int
    stage: str = "round"  # setup | round | final
    round: int = 0  # from 1; 0 in the setup
    trip: int = 0  # exchange within the round
    phase: str = ""
    step: int = 0  # within the phase
    client: int = -1
    examples: int = 0
    data: ClientData = NO_DATA  # the client's own; not in `step`
    cohort: tuple[int, ...] = ()  # the clients of this exchange, in order

    @property
    def unseen(self) -> bool:
        """Whether the client at hand took no part in training: its number is `task.num_clients` or greater."""
        return self.client >= self.task.num_clients

    def at(self, **changes: Any) -> "Context":
        return replace(self, **changes)


@dataclass(frozen=True)
class ProblemSpec:
    """What an algorithm may refuse: the task, the share of clients in a round, their sizes, and how they train.

    `shape` is that of one input; `tokens` says that inputs are whole numbers that stand for words, and no pixels.
    """

    task: Task
    shape: tuple[int, ...]
    tokens: bool
    full_participation: bool  # every client takes part in every round
    cohort: int
    rounds: int
    examples: Mapping[int, int]  # each client's training examples, unseen clients among them, by the partition's number
    validation: Mapping[int, int]  # and those of its validation part
    batch_size: int
    drop_last: bool
    optimizer: Optimizer
    vmap_clients: int


class Algorithm:
    """Base of all algorithms; see the module's text for the rules. Most override a few hooks of `FedAvg` instead."""

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""  # paper and equations
    averaged: ClassVar[tuple[str, ...]] = ()  # fields of `up` of which only the weighted mean is needed
    server_side_weighting: ClassVar[bool] = False  # `weights` needs the other fields of the replies first
    prepares: ClassVar[bool] = False  # `prepare` changes training batches
    supports_loss_terms: ClassVar[bool] = (
        False  # it trains one model by `Task.objective`, to which a wrapper may add terms
    )
    requires_hard_labels: ClassVar[bool] = False  # training needs classes as labels: probabilities (Mixup) will not do
    sample_without_replacement: ClassVar[bool] = (
        False  # sample clients without replacement across rounds, until all have had a turn
    )
    refuses_unseen_clients: ClassVar[str] = ""  # why a client that took no part cannot join at the end; "" where it can
    default_eval_point: ClassVar[str] = (
        "global"  # the point at which the paper scores: global | downloaded | trained | adapted
    )
    logged_scalars: ClassVar[
        tuple[str, ...]
    ] = ()  # scalars of the server's state to record after each round, once there

    # How many exchanges there are; a subclass may write a class attribute (`trips: ClassVar[int] = 2`) or, where it
    # depends on hyperparameters, a property

    @property
    def trips(self) -> int:
        """Exchanges in a round."""
        return 1

    @property
    def setup_exchanges(self) -> int:
        """Exchanges before round 1, with everyone."""
        return 0

    @property
    def final_exchanges(self) -> int:
        """Exchanges after the last round, with everyone."""
        return 0

    # Before anything runs

    def check(self, problem: ProblemSpec) -> None:
        """Raises UsageError if the algorithm cannot do what is asked."""

    def modules(self, task: Task) -> dict[str, nn.Module]:
        """Templates of further networks, found at `task.modules`; their weights belong into the state."""
        return {}

    def adapt(self, ctx: Context) -> Context:
        """The context with which all hooks are called: a wrapper's place to change the task or the optimiser."""
        return ctx

    def remarks(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        """What a user must know of this configuration, a line each: printed when a simulation starts."""
        return ()

    # On the server

    def init(self, ctx: Context) -> State:
        """The server's state before anything was sent."""
        raise NotImplementedError

    def broadcast(self, ctx: Context, server: State) -> State:
        """`down`: what every client of the exchange receives."""
        return server

    def unicast(self, ctx: Context, server: State) -> State:
        """Fields of `down` for the client `ctx.client` alone, added to the broadcast."""
        return {}

    def weight(self, ctx: Context, examples: int) -> float:
        """A client's weight in the mean before normalisation: by default its number of training examples."""
        return float(examples)

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        """With `server_side_weighting`: the clients' weights, taken as they are, in the order of `replies`."""
        raise NotImplementedError

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """The server's next state."""
        raise NotImplementedError

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        """What all rounds so far have spent; None where there is no such promise."""
        return None

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Bytes down and up in a round by the paper's own formula, to stand beside the bytes that were counted.

        `examples` are the training examples of each client of the cohort. Papers count numbers of four bytes. This is
        the one hook that is never inherited: a subclass may send something else, so it has a formula only where its
        own class says so, be it by `bytes_formula = FedAvg.bytes_formula`.
        """
        return None

    # With the client

    def join(self, ctx: Context) -> State:
        """A client's state before its first exchange."""
        return {}

    def phases(self, ctx: Context) -> Sequence[Phase]:
        """The local training of this exchange: by default what the configuration asks for."""
        return (ctx.local,)

    def start(self, ctx: Context, client: State, down: State) -> State:
        """`work` before the first step. The engine copies it, so that it may share tensors with its arguments."""
        raise NotImplementedError

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        """With `prepares`: the training batch that `step` is given in place of `batch`, for each client on its own.

        Never under `torch.vmap`, and seeded for each batch, so what is drawn here is the same at any width.
        """
        return batch

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        """One step on one batch: (work, metrics), each metric a scalar tensor. Must run under `torch.vmap`."""
        raise NotImplementedError

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        """(the client's next state, up) after the last step."""
        raise NotImplementedError

    # Scored models. A "model" is whatever `predict` takes.

    def global_model(self, ctx: Context, server: State) -> Any:
        """The server's model, or None where there is none."""
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        """What the client would use after a download, before training."""
        raise NotImplementedError

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        """What the client has after local training, before aggregation; `client` is its new state."""
        raise NotImplementedError

    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        """Logits [batch, classes] in evaluation mode."""
        return ctx.task.predict(model, x)


@torch.no_grad()
def represent(ctx: Context, weights: Any, part: Any, rows: Tensor | None = None) -> Tensor:
    """Features [n, *feature_shape] of `part` of a client's data (or of its `rows`), in evaluation mode."""
    return torch.cat([ctx.task.represent(weights, batch.x) for batch in part.batches(512, rows)])


@torch.no_grad()
def mean_loss(ctx: Context, weights: Any, part: Any) -> Tensor:
    """Mean loss, a scalar, of `weights` over `part` of a client's data, in evaluation mode."""
    sums = [ctx.task.loss(ctx.task.predict(weights, batch.x), batch.y) * len(batch.y) for batch in part.batches(512)]
    return torch.stack(sums).sum() / len(part)


def server_batches(count: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Shuffled row numbers of `count` items in batches of `size`, the last one smaller; torch's generator."""
    yield from torch.randperm(count).to(device).split(size)
