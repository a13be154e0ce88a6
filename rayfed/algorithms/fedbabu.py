"""FedBABU: Oh, Kim and Yun 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification", Alg. 1.

    client:  SGD on f_i over the body alone; the head stays as it was drawn, the same for everyone
    server:  FedAvg of the bodies; as nobody changes the head, it is never sent
    at the end:  everyone receives the last body and trains body and head for some epochs; nothing comes back

In that last exchange (round R + 1) the client's model becomes its own. Before it, `downloaded` scores the body received
under the common head, which is also the global model; `adapted` scores it after evaluate.adapt_epochs of the same
training of the whole model, and does so at the end, too. Batch norm in the head stays as it was but for statistics.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, Phase, ProblemSpec, Replies, State
from rayfed.algorithms.common.split import body, refuse_without
from rayfed.algorithms.ditto import PERSONAL, PersonalTraining
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Task
from rayfed.core.trees import only


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedAvg):
    """The body is sent; the head is the initial one of everyone until the end, when each client fine-tunes the whole
    model and keeps it. Scored: as downloaded, in rounds the body with the common head, after the last one (round R + 1)
    the fine-tuned model. The fine-tuning starts from the last aggregate, not from the client's last local state."""

    name: ClassVar[str] = "fedbabu"
    reference: ClassVar[str] = "Oh, Kim and Yun 2022, Alg. 1"
    default_eval_point: ClassVar[str] = "downloaded"

    finetune_epochs: int = option(10, low=1, help="epochs of the whole model with every client after the last round")

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.head_names

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return (FineTune(self),)

    @property
    def adaptation(self) -> Exchange:
        return PersonalTraining(self)

    def trained(self, ctx: Context) -> Sequence[str]:
        return ctx.task.trainable if ctx.phase == PERSONAL else body(ctx.task)

    def global_model(self, ctx: Context, server: State) -> Any:
        head = only(ctx.task.initial_weights(), ctx.task.head_names)
        return server["weights"] | head if not ctx.task.personal_names else None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return client["model"] if "model" in client else super().downloaded_model(ctx, client, down)


@dataclass(frozen=True)
class FineTune(Delegate):
    """Final exchange: every client fine-tunes the whole model, keeps it, and sends nothing."""

    base: FedBABU

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (Phase(PERSONAL, self.base.finetune_epochs),)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"model": work["weights"]}, {}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server
