"""FedBABU: Oh, Kim and Yun 2022, "FedBABU: Toward Enhanced Representation for Federated Image Classification", Alg. 1.

    client:  φ_i ← SGD on f_i(φ_t, h_0) over the body alone;  h_0: the initial head, which all clients share
    server:  φ_{t+1} = Σ_i p_i φ_i
    at the end:  all clients receive φ_R, and (φ_i, h_i) ← SGD on f_i from (φ_R, h_0) for some epochs

The fine-tuning is the final exchange (round R + 1) and starts from the last aggregate, not from the client's last local
state. Before it, `downloaded` scores the body received with the common head, which is also the global model. `adapted`
scores it after evaluate.adapt_epochs of the same training; after the last round, the fine-tuned model is scored. In
rounds, the running statistics of batch norm in the head change, but its affine parameters do not. Fine-tuning and
adaptation have an optimiser of their own, since that of the rounds knows nothing of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from rayfed.algorithm import ClientData, Context, Delegate, Exchange, Phase, Replies, State
from rayfed.algorithms.ditto import PERSONAL, PersonalTraining
from rayfed.algorithms.fedper import FedPer, body
from rayfed.core.options import option
from rayfed.core.trees import only, without


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedPer):
    name: ClassVar[str] = "fedbabu"
    reference: ClassVar[str] = "Oh, Kim and Yun 2022, Alg. 1"

    finetune_epochs: int = option(
        5, low=1, help="epochs of the whole model after the last round", elsewhere={"authors": "5", "PFLlib": "10"}
    )

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return (FineTune(self),)

    @property
    def adaptation(self) -> Exchange:
        return PersonalTraining(self)

    def trained(self, ctx: Context) -> Sequence[str]:
        return ctx.task.trainable if ctx.phase == PERSONAL else body(ctx.task)

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, client if ctx.stage == "round" else without(client, ("optimizer",)), down)

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
