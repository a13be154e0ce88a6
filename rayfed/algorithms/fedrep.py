"""FedRep: Collins et al. 2021, "Exploiting Shared Representations for Personalized Federated Learning", Alg. 1.

    client:  keeps its own head; first trains the head for some epochs with the body fixed, then the body with that head
    server:  FedAvg of the bodies; heads are never sent

Each part has an optimiser of its own: with a common one Adam's count of steps, and so its bias correction, would be
that of the other part. As in the authors' code, the forward passes of the head's epochs do update the running
statistics of batch norm in the body.

A client that adapts, an unseen client say, trains its head alone, as the paper's new users do; with `adapted` = both it
trains as in a round, the body for evaluate.adapt_epochs: so says appendix D.4 of Zhang et al. 2023 (DBE).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, Delegate, Exchange, Phase, ProblemSpec, State
from rayfed.algorithms.common.split import body, head, refuse_without
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import only

PARTS = {"head": head, "body": body}  # by the phase that trains them


@dataclass(frozen=True, kw_only=True)
class FedRep(FedAvg):
    name: ClassVar[str] = "fedrep"
    reference: ClassVar[str] = "Collins et al. 2021, Alg. 1"
    default_eval_point: ClassVar[str] = "downloaded"

    head_epochs: int = option(1, low=1, help="epochs of the head, with the body fixed")
    body_epochs: int | None = option(None, low=1, help="epochs of the body after that; by default what local.* says")
    adapted: str = option("head", choices=("head", "both"), help="what adaptation trains: the head, or both as ever")

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.head_names

    def phases(self, ctx: Context) -> Sequence[Phase]:
        body = Phase("body", epochs=self.body_epochs) if self.body_epochs else ctx.local._replace(name="body")
        return Phase("head", epochs=self.head_epochs), body

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
        optimizers = work["optimizer"]  # the step changes the one of its phase in place
        work, metrics = super().step(ctx, work | {"optimizer": optimizers[ctx.phase]}, down, batch)
        return work | {"optimizer": optimizers}, metrics


@dataclass(frozen=True)
class Adaptation(Delegate):
    """Training of the head alone, or of head and body, for `evaluate.adapt_epochs`."""

    base: FedRep

    def phases(self, ctx: Context) -> Sequence[Phase]:
        if self.base.adapted == "head":
            return (ctx.local._replace(name="head"),)
        return Phase("head", epochs=self.base.head_epochs), ctx.local._replace(name="body")
