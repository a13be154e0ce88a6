"""Methods in which clients share the model's body, the part before its split, but not its head, the part after it.

FedPer: Arivazhagan et al. 2019, "Federated Learning with Personalization Layers", Alg. 1 and 2. FedRep: Collins et al.
2021, "Exploiting Shared Representations for Personalized Federated Learning", Alg. 1. FedBABU: Oh, Kim and Yun 2022,
"FedBABU: Toward Enhanced Representation for Federated Image Classification", Alg. 1.

    server:   FedAvg of the bodies φ_i
    fedper:   SGD on f_i(φ, h_i) over both parts at once, for all local epochs; clients keep their heads h_i
    fedrep:   h_i ← SGD on f_i(φ_t, h_i) over the head for some epochs;  φ_i ← SGD on f_i(φ_t, h_i) over the body;
              clients keep their heads
    fedbabu:  φ_i ← SGD on f_i(φ_t, h_0) over the body alone;  h_0: the initial head, which all clients share
              at the end:  all clients receive φ_R, and (φ_i, h_i) ← SGD on f_i from (φ_R, h_0) for some epochs

In the code of FedRep's authors a round has five epochs, and the last one trains the body; `head_epochs` counts those
before. With `shared=head` the two parts change places, as Li, He and Song 2023 (ADCOL) describe their baseline. The
heads are averaged, and the bodies train first and stay with the clients. Each part has its own optimiser. As in that
code, forward passes in the head's epochs update the running statistics of batch norm in the body. A client that adapts
trains only its own part, like the paper's new users. With `adapted=both` it trains both parts like a round, with
evaluate.adapt_epochs for the shared part. Appendix D.4 of Zhang et al. 2023 (DBE) does so.

FedBABU's fine-tuning is the final exchange (round R + 1) and starts from the last aggregate, not from the client's last
local state. Before it, `downloaded` scores the body received with the common head, which is also the global model.
`adapted` scores it after evaluate.adapt_epochs of the same training; after the last round, the fine-tuned model is
scored. In rounds, the running statistics of batch norm in the head change, but its affine parameters do not.
Fine-tuning and adaptation have an optimiser of their own, since that of the rounds knows nothing of the head.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayfed.algorithm import (
    ClientData,
    Context,
    Delegate,
    Exchange,
    Finished,
    Phase,
    ProblemSpec,
    Replies,
    Retrained,
    State,
    Stepped,
)
from rayfed.algorithms.ditto import PERSONAL, personal_training
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import only, without


def body(task: Task) -> tuple[str, ...]:
    """Return the names of the trainable weights before the split."""
    return tuple(name for name in task.trainable if name not in task.head_names)


def head(task: Task) -> tuple[str, ...]:
    """Return the names of the trainable weights after the split."""
    return tuple(name for name in task.trainable if name in task.head_names)


def refuse_without(problem: ProblemSpec, name: str, parts: Iterable[str] = ("head", "body")) -> None:
    """Raise UsageError if one of `parts` of the model has no trainable weights."""
    trainable = {"head": head(problem.task), "body": body(problem.task)}
    for part in parts:
        if not trainable[part]:
            raise UsageError(f"algorithm.name={name}: the model's {part} has nothing to train; use another model")


@dataclass(frozen=True, kw_only=True)
class FedPer(FedAvg):
    name = "fedper"
    reference = "Arivazhagan et al. 2019, Alg. 1 and 2"
    traits = replace(FedAvg.traits, needs_split=True, default_eval_point="downloaded")

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name)

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | task.head_names


PARTS = {"head": head, "body": body}
"""The trainable weights of each phase, which is named after the part that it trains."""


@dataclass(frozen=True, kw_only=True)
class FedRep(FedPer):
    name = "fedrep"
    reference = "Collins et al. 2021, Alg. 1"

    head_epochs: int = option(
        4,
        low=1,
        help="epochs of the client's own part, the head, with the body fixed",
        elsewhere={"authors": "4 (10 in their scripts for CIFAR)", "PFLlib": "1"},
    )
    body_epochs: int | None = option(
        None,
        low=1,
        help="epochs of the shared part after that; null: as local.*",
        elsewhere={"authors": "1", "PFLlib": "as local training, 1"},
    )
    adapted: str = option("head", choices=("head", "both"), help="adaptation trains the head, or both as in a round")
    shared: str = option("body", choices=("body", "head"), help="the part that is averaged, which trains last")

    @property
    def own(self) -> str:
        """The part that stays with the client."""
        return "head" if self.shared == "body" else "body"

    def personal(self, task: Task) -> frozenset[str]:
        if self.shared == "body":
            return super().personal(task)
        body = frozenset(task.initial_weights()) - task.head_names
        return task.personal_names | body

    def phases(self, ctx: Context) -> Sequence[Phase]:
        last = ctx.local._replace(name=self.shared)
        if self.body_epochs:
            last = Phase(self.shared, epochs=self.body_epochs)
        return Phase(self.own, epochs=self.head_epochs), last

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, self.adaptation_phases)

    def adaptation_phases(self, ctx: Context) -> Sequence[Phase]:
        """Return that of the own part for evaluate.adapt_epochs, or that of a round with both parts."""
        if self.adapted == "head":
            return (ctx.local._replace(name=self.own),)
        first = Phase(self.own, epochs=self.head_epochs)
        return first, ctx.local._replace(name=self.shared)

    def trained(self, ctx: Context) -> Sequence[str]:
        return PARTS[ctx.phase](ctx.task)

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        fresh = {}
        for part, names in PARTS.items():
            trained = only(work["weights"], names(ctx.task))
            fresh[part] = ctx.optimizer.init(trained)
        work["optimizer"] = client.get("optimizer", fresh)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        optimizers = work["optimizer"]  # the step updates the one of its phase in place
        of_phase = work | {"optimizer": optimizers[ctx.phase]}
        work, metrics = super().step(ctx, of_phase, down, batch)
        return work | {"optimizer": optimizers}, metrics


@dataclass(frozen=True, kw_only=True)
class FedBABU(FedPer):
    name = "fedbabu"
    reference = "Oh, Kim and Yun 2022, Alg. 1"

    finetune_epochs: int = option(
        5, low=1, help="epochs of the whole model after the last round", elsewhere={"authors": "5", "PFLlib": "10"}
    )

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return (FineTune(self),)

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, personal_training)

    def trained(self, ctx: Context) -> Sequence[str]:
        return ctx.task.trainable if ctx.phase == PERSONAL else body(ctx.task)

    def start(self, ctx: Context, client: State, down: State) -> State:
        if ctx.stage != "round":
            client = without(client, ("optimizer",))
        return super().start(ctx, client, down)

    def global_model(self, ctx: Context, server: State) -> Any:
        if ctx.task.personal_names:
            return None
        head = only(ctx.task.initial_weights(), ctx.task.head_names)
        return server["weights"] | head

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        if "model" in client:
            return client["model"]
        return super().downloaded_model(ctx, client, down)


@dataclass(frozen=True)
class FineTune(Delegate):
    """Final exchange: every client fine-tunes the whole model, keeps it, and sends nothing."""

    base: FedBABU

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (Phase(PERSONAL, self.base.finetune_epochs),)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        return client | {"model": work["weights"]}, {}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server
