"""Any method with DP-SGD in place of its local steps (`local.privacy`): Abadi et al. 2016, Alg. 1, in every client.

    batch:  each record with probability q = B/n, independently in every step;  as many steps as without privacy
    step:   the method's own, with the private gradient of `rayfed.core.private_gradients` in place of the gradient

The unit is one record of one client. What clients send, keep and are scored with is computed from private gradients
alone, so that the steps that a client has taken say what it has spent. Everything else that a method may look at is
closed to it: batches, the clients' data, and the loss. Numbers of records are taken as public, as B and q need them.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from rayfed.algorithm import (
    Algorithm,
    ClientData,
    Context,
    Delegate,
    Exchange,
    Finished,
    Privacy,
    ProblemSpec,
    State,
    Stepped,
    Traits,
)
from rayfed.algorithms.common.wrapper import SectionWrapper, Wrapper
from rayfed.channel.accounting import epsilon_spent
from rayfed.channel.checks import refuse_unusual
from rayfed.core.errors import UsageError
from rayfed.core.private_gradients import PrivateBatch, ReadsData, filled_up, private_step
from rayfed.core.record_privacy import KEY, RecordPrivacy, sampling_rate
from rayfed.core.task import Batch

NEIGHBOURS = "add or remove a record"
"""The notion of neighbouring data sets of a client, whose number of records is public."""
_READS = "reads its clients' data outside of the gradient that has noise"


class _Closed:
    """A part of a client's data that nobody may look at."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ReadsData(_READS)

    def __len__(self) -> int:
        raise ReadsData(_READS)


_CLOSED = ClientData(_Closed(), _Closed(), _Closed(), _Closed())


@dataclass(frozen=True)
class PrivateSteps(Delegate):
    """An exchange with private gradients.

    Attributes:
        clip: C.
        sigma: σ.
        rows: The rows to which batches are filled up, for clients that train at once.
    """

    clip: float
    sigma: float
    rows: int = 1

    @property
    def draws_poisson(self) -> bool:
        return True

    def start(self, ctx: Context, client: State, down: State) -> State:
        return self.target.start(ctx.at(data=_CLOSED), client, down)

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        """Return the records of a batch, closed, with the noise of the step."""
        weights = ctx.task.initial_weights()
        device = ctx.task.device
        scale = self.sigma * self.clip
        noise = {}
        for name in ctx.task.trainable:
            like = weights[name]
            drawn = torch.randn(like.shape, dtype=like.dtype)  # on the CPU: the same on every device
            noise[name] = (scale * drawn).to(device)
        taken = torch.ones(len(batch.y), dtype=torch.bool, device=device)
        if not len(taken):  # a row that does not count, in place of none
            batch = next(iter(ctx.data.train.batches(1)))
            taken = torch.zeros(1, dtype=torch.bool, device=device)
        private = PrivateBatch(
            taken=taken,
            inputs=batch.x,
            labels=batch.y,
            noise=noise,
            clip=torch.tensor(self.clip, device=device),
            expected=torch.tensor(float(min(ctx.batch_size, ctx.examples)), device=device),
        )
        filled: Any = filled_up(private, self.rows)
        closed: Batch = filled  # a method passes it on to the gradient
        return closed

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        with private_step() as taken:
            work, metrics = self.target.step(ctx, work, down, batch)
        if taken.loss is None:
            raise ReadsData("takes no gradient of the loss of a model")
        return work, metrics | {"loss": taken.loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        return self.target.finish(ctx.at(data=_CLOSED), work, client, down, _CLOSED)


@dataclass(frozen=True, kw_only=True)
class PrivateTraining(SectionWrapper):
    """`base` with private gradients in all of its exchanges.

    Attributes:
        privacy: The options.
        sigma: σ, which the options give or the plan solves for.
        rows: The rows to which batches are filled up, for clients that train at once.
    """

    privacy: RecordPrivacy = field()
    sigma: float = 0.0
    rows: int = 1

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        traits = super().traits
        solved = self.privacy.target_epsilon is not None
        return replace(traits, depends_on_rounds=traits.depends_on_rounds or solved)

    def wrapped(self, exchange: Exchange) -> Exchange:
        return PrivateSteps(exchange, self.privacy.max_grad_norm, self.sigma, self.rows)

    def check(self, problem: ProblemSpec) -> None:
        self.base.check(problem)
        weights = problem.task.initial_weights()
        refuse_unusual(weights, f"{KEY} clips and adds noise to")
        most = max(problem.examples.values())
        delta = self.privacy.delta
        if delta is not None and delta * most >= 1:
            raise UsageError(
                f"{KEY}.delta={delta:g}: must be less than one over the records of every client, {1 / most:.3g}; "
                "otherwise publishing one of them would satisfy it"
            )

    def join(self, ctx: Context) -> State:
        return self.base.join(ctx.at(data=_CLOSED))

    def privacy_of_record(self, ctx: Context, steps: int) -> Privacy | None:
        privacy = self.privacy
        if not self.sigma or privacy.delta is None:
            return None
        rate = sampling_rate(ctx.batch_size, ctx.examples)
        epsilon = epsilon_spent(self.sigma, privacy.delta, rate=rate, steps=steps, accountant=privacy.accountant)
        return Privacy(epsilon, "record", privacy.delta, privacy.accountant, NEIGHBOURS)


def private_training_of(algorithm: Algorithm) -> PrivateTraining | None:
    """Return the DP-SGD that a configuration has put into a method, inside a channel or not; None without."""
    while isinstance(algorithm, Wrapper):
        if isinstance(algorithm, PrivateTraining):
            return algorithm
        algorithm = algorithm.base
    return None
