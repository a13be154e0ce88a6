"""FedRep: Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning", Alg. 1.

    client:  h_i ← SGD on f_i(φ_t, h_i) over the head for some epochs;  φ_i ← SGD on f_i(φ_t, h_i) over the body
    server:  φ_{t+1} = Σ_i p_i φ_i;  clients keep their heads

In the authors' code a round has five epochs, of which the last one is of the body; `head_epochs` counts those before.

Each part has its own optimiser. As in the authors' code, forward passes in the head's epochs update the running
statistics of batch norm in the body.

A client that adapts trains only its head, like the paper's new users. With `adapted=both` it trains both parts as in a
round, with evaluate.adapt_epochs for the body, as in appendix D.4 of Zhang et al. 2023 (DBE).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, Delegate, Exchange, Phase, State
from rayfed.algorithms.fedper import FedPer, body, head
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import only

PARTS = {"head": head, "body": body}
"""The trainable weights of each phase, which is named after the part that it trains."""


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    name: ClassVar[str] = "fedrep"
    reference: ClassVar[str] = "Collins et al. 2021, Alg. 1"

    head_epochs: int = option(
        4,
        low=1,
        help="epochs of the head, with the body fixed",
        elsewhere={"authors": "4 (10 in their scripts for CIFAR)", "PFLlib": "1"},
    )
    body_epochs: int | None = option(
        None,
        low=1,
        help="epochs of the body after that; null: as local.*",
        elsewhere={"authors": "1", "PFLlib": "as local training, 1"},
    )
    adapted: str = option("head", choices=("head", "both"), help="adaptation trains the head, or both as in a round")

    def phases(self, ctx: Context) -> Sequence[Phase]:
        body_phase = Phase("body", epochs=self.body_epochs) if self.body_epochs else ctx.local._replace(name="body")
        return Phase("head", epochs=self.head_epochs), body_phase

    @property
    def adaptation(self) -> Exchange:
        return Adaptation(self)

    def trained(self, ctx: Context) -> Sequence[str]:
        return PARTS[ctx.phase](ctx.task)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        fresh = {part: ctx.optimizer.init(only(work["weights"], names(ctx.task))) for part, names in PARTS.items()}
        return work | {"optimizer": client.get("optimizer", fresh)}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        optimizers = work["optimizer"]  # the step updates the one of its phase in place
        work, metrics = super().step(ctx, work | {"optimizer": optimizers[ctx.phase]}, down, batch)
        return work | {"optimizer": optimizers}, metrics


@dataclass(frozen=True)
class Adaptation(Delegate):
    """Adaptation of the head alone for evaluate.adapt_epochs, or of the head as in a round and then the body."""

    base: FedRep

    def phases(self, ctx: Context) -> Sequence[Phase]:
        if self.base.adapted == "head":
            return (ctx.local._replace(name="head"),)
        return Phase("head", epochs=self.base.head_epochs), ctx.local._replace(name="body")
