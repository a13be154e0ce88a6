"""What a method sends, found by running its hooks on a few examples."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil

from torch import Tensor

from rayfed.algorithm import Algorithm, ClientData, Context, Delegate, Exchange, Phase, Replies, Reply, State
from rayfed.algorithms.common.wrapper import Wrapper
from rayfed.core.ids import Stage
from rayfed.core.lr_schedule import CONSTANT
from rayfed.core.rng import global_state_kept
from rayfed.core.trees import leaves, tree_map
from rayfed.data.population import small_population
from rayfed.engine.evaluation import Evaluation
from rayfed.engine.host import LocalFleet
from rayfed.engine.server import Server
from rayfed.experiments.checks.trial import Trial

_CLIENTS = 32  # at most: options may name clients
_BATCH = 8  # examples of a batch, at most
_BATCHES = 3  # of each client


@dataclass
class Sent:
    """What clients send in one exchange.

    Attributes:
        averaged: The fields of which the server needs the mean.
        fields: The fields that a client sends, with tensors without contents.
        reads_examples: Whether the server looks at the clients' numbers of examples.
    """

    stage: Stage
    averaged: tuple[str, ...]
    fields: State = field(default_factory=dict)
    reads_examples: bool = False

    @property
    def others(self) -> list[str]:
        """The fields that the server receives one by one."""
        return [name for name, value in self.fields.items() if name not in self.averaged and leaves(value)]

    @property
    def sent(self) -> list[str]:
        """The fields with anything in them."""
        return [name for name, value in self.fields.items() if leaves(value)]

    @property
    def updates(self) -> list[Tensor]:
        """The tensors of the averaged fields."""
        return leaves({name: value for name, value in self.fields.items() if name in self.averaged})


class _Enough(Exception):
    """All exchanges were seen."""


class _WatchedReply(Reply):
    """A reply that notes whether its number of examples is read."""

    sent: Sent

    @property
    def examples(self) -> int:
        self.sent.reads_examples = True
        return int(self[1])


@dataclass(frozen=True)
class _Watched(Delegate):
    """An exchange that notes in `sent` what its clients send."""

    sent: Sent
    is_last: bool

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        state, up = self.target.finish(ctx, work, client, down, data)
        self.sent.fields |= tree_map(lambda value: value.to("meta"), up)
        if self.is_last:
            raise _Enough
        return state, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        each = [_WatchedReply(*reply) for reply in replies.each]
        for reply in each:
            reply.sent = self.sent
        return self.target.aggregate(ctx, server, replies._replace(each=each))


@dataclass(frozen=True, kw_only=True)
class _Watching(Wrapper):
    """A method whose exchanges are watched: all with `whole`, and else those until the first reply of a round."""

    log: dict[tuple[Stage, int], Sent] = field(default_factory=dict)
    whole: bool = True

    def _watched(self, stage: Stage, exchanges: Sequence[Exchange]) -> Sequence[Exchange]:
        watched = []
        for number, exchange in enumerate(exchanges):
            sent = self.log.setdefault((stage, number), Sent(stage, tuple(exchange.averaged)))
            is_last = stage == "round" and number == len(exchanges) - 1 and not self.whole
            watched.append(_Watched(exchange, sent, is_last))
        return watched

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return self._watched("setup", self.base.setup_exchanges)

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return self._watched("round", self.base.round_exchanges)

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return self._watched("final", self.base.final_exchanges)


def what_is_sent(trial: Trial, method: Algorithm, *, whole: bool) -> list[Sent]:
    """Return what clients send with `method` in each exchange, in order.

    The setup and a round with one step of training run on a few examples of at most 32 clients. With `whole`, the round
    goes to its end and the final stage runs, too, which shows what the server reads.
    """
    size = min(trial.blueprint.batch_size, _BATCH)
    examples = ceil((_BATCHES * size + 1) / (1 - method.held_out_share))
    small = small_population(trial.population, _CLIENTS, [examples], size)
    watching = _Watching(base=method, whole=whole)
    plan = trial.blueprint.undisturbed(
        algorithm=watching,
        local=Phase("train", steps=1),
        batch_size=size,
        rounds=1,
        cohort=len(small.participants),
        schedule=CONSTANT,
    )
    with global_state_kept(), suppress(_Enough):
        server = Server(plan, small, LocalFleet(plan, small), Evaluation(points=(), splits=()))
        for _ in server.run():
            pass
    return list(watching.log.values())
