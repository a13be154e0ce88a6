"""The interface that every algorithm implements.

State lives in five places and nowhere else. Each is a dictionary of nested dictionaries of tensors:

    server    the server's state; kept between rounds
    client    the state of one client; kept between rounds and never sent
    down      what the server sends to the clients; every field is counted in bytes
    up        what a client sends back; every field is counted in bytes
    work      scratch space of one client during one exchange

Hooks take state and return new state. They must not modify their inputs, with one exception: `work` is the engine's
private copy for that client, and `step` and `finish` may change it in place. An algorithm object holds hyperparameters
only: it is a frozen dataclass, with fields declared by `rayfed.option`.

One `Exchange` between the server and the clients of a cohort calls, in this order,

    broadcast, unicast  →  start  →  step, step, …  →  finish  →  aggregate
    (on the server)        (with every client of the cohort)      (on the server)

An `Algorithm` is itself the one exchange of each of its rounds, in which the sampled clients take part. Methods that
need more list them: `round_exchanges` for each round, and `setup_exchanges` and `final_exchanges`, in which all
clients take part, for the time before the first round and after the last.

Unseen clients take no part in training and may join when it is over. Each of them calls `join` and goes through the
setup exchanges with the server's final state (its replies are dropped). Then it downloads the model and is scored
before and after local training. Its index is at least `task.num_clients`, so tables indexed by client have no row for
it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError
from rayfed.core.ids import ClientId, ClientIndex, Moment, Stage
from rayfed.core.lr_schedule import CONSTANT, LrSchedule
from rayfed.core.optim import Optimizer
from rayfed.core.task import Batch, Task
from rayfed.core.trees import bytes_by_field

State = dict[str, Any]
"""A dictionary of tensors, or of nested dictionaries of tensors."""
Metrics = dict[str, Tensor]
"""What a step measured: scalar tensors by name."""
Stepped = tuple[State, Metrics]
"""What `step` returns: the next `work`, and what it measured."""
Finished = tuple[State, State]
"""What `finish` returns: the client's next state, and `up`."""


class Phase(NamedTuple):
    """A stretch of local training: a number of epochs or of steps over batches of the client's training data.

    `steps` overrides `epochs`. `batch_size` is the configured one by default.
    """

    name: str
    epochs: int | None = None
    steps: int | None = None
    batch_size: int | None = None


class Reply(NamedTuple):
    """The fields of one client's `up` that are not averaged, and the number of its training examples."""

    client: ClientIndex
    examples: int
    up: State


class Replies(NamedTuple):
    """All replies of an exchange.

    Attributes:
        mean: The weighted mean of every averaged field.
        each: Each reply, in client order.
        weights: The weight of each reply in the mean. They sum to 1 unless the sampler or the staleness of replies says
            otherwise.
    """

    mean: State
    each: Sequence[Reply]
    weights: Sequence[float] = ()


class ClientData(NamedTuple):
    """The data of one client.

    Each part has a length, labels `y`, and `batches(size, rows=None)`, which yields `Batch`es. `augmented` is the
    training part with augmented inputs, or None where training batches are not augmented. `held_out` are the training
    examples that the algorithm keeps from training (`Algorithm.held_out_share`).
    """

    train: Any
    val: Any
    augmented: Any = None
    held_out: Any = None

    @property
    def as_trained(self) -> Any:
        """The training part as local training sees it, augmented with random draws of this exchange.

        Changes that `prepare` makes to training batches are not included.
        """
        if self.augmented is None:
            return self.train
        return self.augmented


NO_DATA = ClientData(None, None)


class Privacy(NamedTuple):
    """The ε and δ of differential privacy, and what they mean.

    Attributes:
        epsilon: ε.
        unit: The unit of data that it protects, such as a record or a client.
        delta: δ; None where the method does not say.
        accountant: The accountant that has computed ε; None where the method does not say.
        neighbours: How data sets differ between which nobody can tell; None where the method does not say.
    """

    epsilon: float
    unit: str
    delta: float | None = None
    accountant: str | None = None
    neighbours: str | None = None


@dataclass
class Context:
    """What a hook may read besides state. The engine writes it; hooks must not.

    `client`, `examples` and `data` belong to the client that the hook runs for, where there is one. `step` may run for
    many clients at once, so it finds what it needs to know about its client in `work`. With a schedule, the learning
    rates that `step` reads on a GPU are scalar tensors.

    Attributes:
        optimizer: The optimiser of local training, with the learning rate of the round.
        local: The local training that the configuration asks for.
        rounds: The number of communication rounds.
        keep_optimizer: Whether clients keep the optimiser's state between rounds.
        stage: "setup", "round" or "final".
        round: The round, from 1; 0 in the setup and `rounds + 1` in the final stage.
        exchange: The position of the exchange in its stage or round, from 0.
        phase: The name of the phase, during local training.
        step: The position of the step in its phase, from 0.
        client: The client's index, or -1.
        cohort: The clients of this exchange, in ascending order.
        staleness: For each client of the cohort, the updates of the server since it started; in rounds that wait, 0.
        schedule: The schedule of learning rates over the rounds.
        lr_factor: The schedule's factor in this round; 1 in the setup, in the final stage and in the adaptation before
            a model is scored.
        configured_lr: The learning rate of `optimizer` before the schedule; None until the schedule changes it.
    """

    task: Task
    optimizer: Optimizer
    batch_size: int
    local: Phase
    rounds: int
    keep_optimizer: bool = False
    stage: Stage = "round"
    round: int = 0
    exchange: int = 0
    phase: str = ""
    step: int = 0
    client: int = -1
    examples: int = 0
    data: ClientData = NO_DATA
    cohort: tuple[ClientIndex, ...] = ()
    staleness: tuple[int, ...] = ()
    schedule: LrSchedule = CONSTANT
    lr_factor: float = 1.0
    configured_lr: float | None = None

    @property
    def unseen(self) -> bool:
        """Whether the client took no part in training."""
        return self.client >= self.task.num_clients

    @property
    def moment(self) -> Moment:
        """Stage, round and exchange."""
        return Moment(self.stage, self.round, self.exchange)

    def at(self, moment: Moment | None = None, **changes: Any) -> "Context":
        """Return a copy with `changes`, at another `moment` if one is given."""
        if moment is not None:
            changes = moment._asdict() | changes
        ctx = replace(self, **changes)
        if not ctx.schedule.is_constant:
            ctx._apply_schedule()
        return ctx

    def _apply_schedule(self) -> None:
        """Give the optimiser the learning rate of the round."""
        if isinstance(self.lr_factor, Tensor):  # see `with_rates`
            return
        factor = 1.0
        if self.stage == "round":
            factor = self.schedule.factor(self.round, self.rounds)
        if factor == self.lr_factor:
            return
        if self.configured_lr is None:
            self.configured_lr = self.optimizer.lr
        # from the configured rate, whichever rounds this context has seen
        self.optimizer = replace(self.optimizer, lr=self.configured_lr * factor)
        self.lr_factor = factor

    def with_rates(self, lr: Tensor, factor: Tensor) -> "Context":
        """Return a copy for steps that read the learning rate and the schedule's factor from tensors, scalars.

        A CUDA graph repeats numbers from Python as they were, and reads tensors anew.
        """
        optimizer = replace(self.optimizer, lr=cast(float, lr))
        return replace(self, optimizer=optimizer, lr_factor=cast(float, factor))

    def scaled(self, lr: float) -> float:
        """Return the algorithm's own learning rate `lr` as scheduled for this round, like local.lr."""
        return lr * self.lr_factor


@dataclass(frozen=True)
class ProblemSpec:
    """What an algorithm may refuse in `check`: the task, the sizes of the clients, and how they train.

    Attributes:
        shape: The shape of one input.
        tokens: Whether inputs are integers that stand for words.
        full_participation: Whether every client takes part in every round.
        cohort: The number of clients in a round.
        examples: The number of training examples of each client, unseen clients included.
        validation: The number of validation examples of each client.
        vmap_clients: The number of clients that a host trains at once.
    """

    task: Task
    shape: tuple[int, ...]
    tokens: bool
    full_participation: bool
    cohort: int
    rounds: int
    examples: Mapping[ClientId, int]
    validation: Mapping[ClientId, int]
    batch_size: int
    drop_last: bool
    optimizer: Optimizer
    vmap_clients: int


class Exchange:
    """One exchange between the server and the clients of a cohort.

    By default nothing is sent, no client trains and no state changes; a subclass overrides the hooks that it needs. An
    exchange that changes some hooks of another exchange derives from `Delegate`.
    """

    averaged: ClassVar[tuple[str, ...]] = ()
    """The fields of `up` that the server needs only as their weighted mean."""

    # On the server

    def broadcast(self, ctx: Context, server: State) -> State:
        """Return `down`: what every client of the exchange receives."""
        return {}

    def unicast(self, ctx: Context, server: State) -> State:
        """Return further fields of `down` for the client `ctx.client` alone."""
        return {}

    def weight(self, ctx: Context, examples: int) -> float:
        """Return a client's weight in the mean before normalisation; by default its number of training examples."""
        return float(examples)

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        """Return the weight of each of `replies`, used without normalisation.

        Override it where weights depend on what clients send; `weight` is not called then.
        """
        raise NotImplementedError

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """Return the server's next state."""
        return server

    def received_bytes(
        self, ctx: Context, server: State, down: State, clients: Sequence[ClientIndex]
    ) -> Mapping[str, int]:
        """Return the bytes in which all of `clients` receive `down`, by field; only encodings differ from tensors."""
        return {name: size * len(clients) for name, size in bytes_by_field(down).items()}

    # With a client

    def phases(self, ctx: Context) -> Sequence[Phase]:
        """Return the local training of this exchange."""
        return ()

    def start(self, ctx: Context, client: State, down: State) -> State:
        """Return `work` before the first step. The engine copies it, so it may share tensors with the arguments."""
        return {}

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        """Return the training batch that `step` receives in place of `batch`.

        It is called for each client separately, never under `torch.vmap`. Each batch has a random state of its own, so
        that its draws are the same for any `vmap_clients`.
        """
        return batch

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        """Train on one batch and return (work, metrics), each metric a scalar tensor. Must run under `torch.vmap`."""
        raise NotImplementedError

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        """Return (the client's next state, `up`) after the last step."""
        return client, {}

    def sent_bytes(self, up: State) -> Mapping[str, int]:
        """Return the bytes that `up` takes on the wire, by field; only encodings differ from the bytes of tensors."""
        return bytes_by_field(up)

    # Derived from the hooks that a class overrides

    @property
    def server_side_weighting(self) -> bool:
        """Whether the server computes the weights from the replies, with `weights`."""
        return type(self).weights is not Exchange.weights

    @property
    def prepares_batches(self) -> bool:
        """Whether `prepare` changes training batches."""
        return type(self).prepare is not Exchange.prepare

    @property
    def draws_poisson(self) -> bool:
        """Whether every example is in every batch with one probability, independently of the others."""
        return False


_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def delegated(hook: _Hook, attribute: str) -> _Hook:
    """Return a hook that calls the same hook of the object that `self` has as `attribute`."""

    @functools.wraps(hook)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(self, attribute), hook.__name__)(*args, **kwargs)

    return cast(_Hook, call)


@dataclass(frozen=True)
class Delegate(Exchange):
    """An exchange with the hooks of `base`, except for those that a subclass overrides."""

    base: Exchange

    @property
    def target(self) -> Exchange:
        """The exchange whose hooks are called."""
        return self.base

    @property
    def averaged(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.target.averaged

    @property
    def server_side_weighting(self) -> bool:
        return type(self).weights is not Delegate.weights or self.target.server_side_weighting

    @property
    def prepares_batches(self) -> bool:
        return type(self).prepare is not Delegate.prepare or self.target.prepares_batches

    @property
    def draws_poisson(self) -> bool:
        return self.target.draws_poisson

    broadcast = delegated(Exchange.broadcast, "target")
    unicast = delegated(Exchange.unicast, "target")
    received_bytes = delegated(Exchange.received_bytes, "target")
    weight = delegated(Exchange.weight, "target")
    weights = delegated(Exchange.weights, "target")
    aggregate = delegated(Exchange.aggregate, "target")
    phases = delegated(Exchange.phases, "target")
    start = delegated(Exchange.start, "target")
    prepare = delegated(Exchange.prepare, "target")
    step = delegated(Exchange.step, "target")
    finish = delegated(Exchange.finish, "target")
    sent_bytes = delegated(Exchange.sent_bytes, "target")


@dataclass(frozen=True)
class Retrained(Delegate):
    """An exchange with the hooks of `base` and with the local training `training`, by the context."""

    training: Callable[[Context], Sequence[Phase]]

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return self.training(ctx)


@dataclass(frozen=True)
class HandOut(Exchange):
    """An exchange in which every client receives the fields `names` of the server's state and keeps them.

    If `weight_name` is given, clients keep the one field as the weight with that name.
    """

    names: tuple[str, ...]
    weight_name: str = ""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {name: server[name] for name in self.names}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        if not self.weight_name:
            return client | down, {}
        (field,) = self.names
        weights = client["weights"] | {self.weight_name: down[field]}
        return client | {"weights": weights}, {}


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the engine must know about an algorithm besides its hooks.

    A subclass changes single traits of its base, such as `traits = replace(FedAvg.traits, requires_classes=True)`.

    Attributes:
        supports_loss_terms: It trains one model by `Task.objective`, to which a wrapper may add terms.
        requires_hard_labels: Training needs classes as labels. It cannot use class probabilities, which Mixup makes.
        requires_classes: The model must have one output for each class. One logit for two classes is refused, and so
            are numbers for a user's loss.
        mixes_labels: Training takes means of labels, so the loss must accept them.
        needs_split: It uses the model's features or its head (`Task.head`, `Task.head_names`, `Task.feature_shape`,
            `Output.features`), for which the model is split.
        computes_with_inputs: It does more with inputs than to choose, join and pass them on, so that each must be one
            array.
        sample_without_replacement: Clients are sampled without replacement across rounds, until all have taken part.
        assumes_uniform_sampling: `aggregate` assumes that all clients take part equally often, or weighs some fields
            of `up` itself.
        refuses_unseen_clients: Why unseen clients cannot join after training; empty if they can.
        default_eval_point: The point at which the paper scores models: "global", "downloaded", "trained" or "adapted".
        logged_scalars: Scalars of the server's state that are recorded after each round, once they exist.
        keeps_optimizer: Whether clients keep the optimiser's state between rounds if local.keep_optimizer does not
            say; None: there is no choice.
        trains_server: `aggregate` trains a network, such as a discriminator, for which the server needs a GPU as hosts
            do.
        depends_on_rounds: A round depends on how many follow (`ctx.rounds`), such as by its share of a privacy budget.
            Trials of such algorithms are not continued with more rounds.
    """

    supports_loss_terms: bool = False
    requires_hard_labels: bool = False
    requires_classes: bool = False
    mixes_labels: bool = False
    needs_split: bool = False
    computes_with_inputs: bool = False
    sample_without_replacement: bool = False
    assumes_uniform_sampling: bool = False
    refuses_unseen_clients: str = ""
    default_eval_point: str = "global"
    logged_scalars: tuple[str, ...] = ()
    keeps_optimizer: bool | None = None
    trains_server: bool = False
    depends_on_rounds: bool = False

    def declared(self) -> dict[str, Any]:
        """Return the traits that differ from their defaults."""
        found = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                found[field.name] = value
        return found


TRAITS = frozenset(field.name for field in fields(Traits))
"""The names of the traits."""


class Algorithm(Exchange):
    """Base class of all algorithms, and the exchange of their rounds.

    Most algorithms override a few hooks of `rayfed.algorithms.fedavg.FedAvg` instead of deriving from this class.
    """

    name: ClassVar[str] = ""
    reference: ClassVar[str] = ""
    """The paper, with the algorithm or equations implemented."""
    traits: ClassVar[Traits] = Traits()
    """What the engine must know about it. A subclass changes one by `traits = replace(FedAvg.traits, …)`."""
    personal_weights: ClassVar[tuple[str, ...]] = ()
    """The value of `algorithm.personal`: patterns of the names of weights that stay with the client."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for name in sorted(TRAITS.intersection(vars(cls))):
            raise UsageError(
                f"{cls.__module__}.{cls.__qualname__}: {name} is one of the traits; declare "
                f"traits = replace({cls.__mro__[1].__name__}.traits, {name}=…)"
            )

    @property
    def held_out_share(self) -> float:
        """The share of every client's training examples that nobody trains on; hooks find them at
        `ctx.data.held_out`."""
        return 0.0

    # Exchanges

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        """The exchanges with all clients before the first round."""
        return ()

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        """The exchanges of every round with its cohort: by default one, with the algorithm's own hooks."""
        return (self,)

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        """The exchanges with all clients after the last round."""
        return ()

    @property
    def adaptation(self) -> Exchange:
        """The local training of a downloaded model before it is scored at the point `adapted`.

        Only its `phases`, `start`, `prepare` and `step` are called; `ctx.local` has `evaluate.adapt_epochs` epochs.
        """
        return self.round_exchanges[0]

    def exchanges(self, stage: Stage) -> Sequence[Exchange]:
        """Return the exchanges of a stage; those of "round" are repeated in each round."""
        if stage == "setup":
            return self.setup_exchanges
        if stage == "round":
            return self.round_exchanges
        return self.final_exchanges

    # Before a run

    def check(self, problem: ProblemSpec) -> None:
        """Raise UsageError if the algorithm cannot do what is asked."""

    def modules(self, task: Task) -> dict[str, nn.Module]:
        """Return templates of further networks, found at `task.modules`; their weights belong to the state."""
        return {}

    def adapt(self, ctx: Context) -> Context:
        """Return the context for all hooks. A wrapper may change the task or the optimiser here."""
        return ctx

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        """Return what a user should know about this configuration, one line each. Printed before a run."""
        return ()

    # State

    def init(self, ctx: Context) -> State:
        """Return the server's state before anything was sent."""
        raise NotImplementedError

    def join(self, ctx: Context) -> State:
        """Return a client's state before its first exchange."""
        return {}

    # Hooks of the exchange that every algorithm needs

    def broadcast(self, ctx: Context, server: State) -> State:
        return server

    def phases(self, ctx: Context) -> Sequence[Phase]:
        """Return the local training that the configuration asks for."""
        return (ctx.local,)

    def start(self, ctx: Context, client: State, down: State) -> State:
        raise NotImplementedError

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        raise NotImplementedError

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        raise NotImplementedError

    # After a round

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        """Return the privacy spent by all rounds so far, or None without a guarantee."""
        return None

    def privacy_of_record(self, ctx: Context, steps: int) -> Privacy | None:
        """Return what protects one record of the client of `ctx` after its first `steps` local steps, if anything."""
        return None

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return the bytes of a round in both directions by the paper's formula, to compare with the bytes counted.

        Papers count four bytes per number. `examples` are the numbers of training examples of the cohort's clients.
        This hook is not inherited, since a subclass may send something else: it has the formula of its base only if it
        says `bytes_formula = FedAvg.bytes_formula`.
        """
        return None

    # Scored models. A "model" is whatever `predict` takes.

    def global_model(self, ctx: Context, server: State) -> Any:
        """Return the server's model, or None if there is none."""
        return None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        """Return the model that the client uses after a download, before training."""
        raise NotImplementedError

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        """Return the client's model after local training, before aggregation; `client` is its new state."""
        raise NotImplementedError

    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        """Return logits of shape [batch, classes], computed in evaluation mode."""
        return ctx.task.predict(model, x)


@torch.no_grad()
def represent(ctx: Context, weights: Any, part: Any, rows: Tensor | None = None) -> Tensor:
    """Return the features [n, *feature_shape] of a part of a client's data, or of its `rows`, in evaluation mode."""
    features = [ctx.task.represent(weights, batch.x) for batch in part.batches(512, rows)]
    return torch.cat(features)


@torch.no_grad()
def mean_loss(ctx: Context, weights: Any, part: Any) -> Tensor:
    """Return the mean loss of `weights` over a part of a client's data, a scalar, in evaluation mode."""
    sums = []
    for batch in part.batches(512):
        logits = ctx.task.predict(weights, batch.x)
        loss = ctx.task.scoring_loss(logits, batch.y, weights)
        sums.append(loss * len(batch.y))
    return torch.stack(sums).sum() / len(part)


def server_batches(count: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield shuffled row numbers of `count` items in batches of `size`, the last one smaller."""
    yield from torch.randperm(count).to(device).split(size)
