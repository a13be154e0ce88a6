"""FedAvg: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Alg. 1; and
methods that differ from it only in what is scored or sent.

    client:  w_i ← w_t, then SGD on its own mean loss f_i for E epochs
    server:  w_{t+1} = Σ_i p_i w_i,  p_i = n_i / Σ_j n_j over the cohort

    fedavg_ft:  scores w_t after SGD on all of it for `evaluate.adapt_epochs` epochs on the client's training data
                (Collins et al. 2022, "FedAvg with Fine Tuning: Local Updates Lead to Representation Learning")
    pfedavg:    scores w_i after local training, before aggregation (Chen et al. 2023, table 2, where this baseline of
                FRAug has a name and no definition); clients outside the cohort of a round have no such score in it
    solo:       w_i ← SGD on f_i, continuing from the last round; nothing is sent, and all clients start from the same
                weights (Li, He and Song 2023, section 5, baseline of ADCOL)

`fedavg` with `evaluate.points=[adapted]` or `[trained]` has the values of fedavg_ft or pfedavg; the names make rows of
their own in tables. In solo, rounds only determine when models are scored, so clients keep the optimiser's state.

Most methods derive from FedAvg and change one hook. Besides the hooks of `Algorithm` these are `personal` (the weights
that stay with the client), `trained` (the weights that a phase trains), `loss`, and `correct` (the gradients that the
optimiser receives). `weighting=equal` replaces n_i by 1 in them, too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from rayfed.algorithm import Algorithm, ClientData, Context, Replies, State, Traits
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.core.network import gradients
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only, without


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Algorithm):
    """FedAvg without the choice of `weighting`, for methods whose server does not average by it."""

    averaged: ClassVar[tuple[str, ...]] = ("weights",)
    traits: ClassVar[Traits] = replace(Algorithm.traits, supports_loss_terms=True, keeps_optimizer=False)

    def personal(self, task: Task) -> frozenset[str]:
        """Return the names of the weights that stay with the client, by default those of the batch-norm policy."""
        return task.personal_names

    def trained(self, ctx: Context) -> Sequence[str]:
        """Return the names of the weights that the current phase trains."""
        return ctx.task.trainable

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        """Return the loss of `weights` on a batch, and the network's output."""
        return ctx.task.objective(weights, batch)

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        """Return the gradients that the optimiser receives."""
        return grads

    def init(self, ctx: Context) -> State:
        return {"weights": without(ctx.task.initial_weights(), self.personal(ctx.task))}

    def join(self, ctx: Context) -> State:
        return {"weights": only(ctx.task.initial_weights(), self.personal(ctx.task))}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"weights": server["weights"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        weights = down["weights"] | client["weights"]
        fresh = ctx.optimizer.init(only(weights, ctx.task.trainable))
        return {"weights": weights, "optimizer": client.get("optimizer", fresh)}

    def loss_gradients(
        self, ctx: Context, trained: Weights, work: State, down: State, batch: Batch
    ) -> tuple[Weights, Tensor, Weights]:
        """Return (∇ `loss` at the weights `trained`, the loss, the network's next buffers)."""

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.loss(ctx, work["weights"] | trained, work, down, batch)
            return value, output.buffers

        return gradients(objective, trained)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]
        grads, loss, buffers = self.loss_gradients(ctx, only(weights, self.trained(ctx)), work, down, batch)
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        names = self.personal(ctx.task)
        kept = {"weights": only(work["weights"], names)}
        if ctx.keep_optimizer:
            kept["optimizer"] = work["optimizer"]
        return client | kept, {"weights": without(work["weights"], names)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"weights": replies.mean["weights"]}

    def global_model(self, ctx: Context, server: State) -> Any:
        return server["weights"] if not self.personal(ctx.task) else None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return down["weights"] | client["weights"]

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return work["weights"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalTraining):
    name: ClassVar[str] = "fedavg"
    reference: ClassVar[str] = "McMahan et al. 2017, Alg. 1"

    weighting: str = weighting_option("examples")

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.weighting == "equal" else float(examples)

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return 2 · N · S for N clients of the round and S bytes of parameters that are sent."""
        sent = without(ctx.task.initial_weights(), self.personal(ctx.task))
        parameters = sum(sent[name].numel() for name in ctx.task.parameters if name in sent)
        return 2.0 * len(examples) * 4 * parameters


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    name: ClassVar[str] = "fedavg_ft"
    reference: ClassVar[str] = "Collins et al. 2022"
    traits: ClassVar[Traits] = replace(FedAvg.traits, default_eval_point="adapted")

    bytes_formula = FedAvg.bytes_formula


@dataclass(frozen=True, kw_only=True)
class PFedAvg(FedAvg):
    name: ClassVar[str] = "pfedavg"
    reference: ClassVar[str] = "Chen et al. 2023 (FRAug), table 2, baseline pFedAvg"
    traits: ClassVar[Traits] = replace(FedAvg.traits, default_eval_point="trained")


@dataclass(frozen=True, kw_only=True)
class Solo(LocalTraining):
    name: ClassVar[str] = "solo"
    reference: ClassVar[str] = "Li, He and Song 2023 (ADCOL), section 5, baseline SOLO"
    traits: ClassVar[Traits] = replace(LocalTraining.traits, default_eval_point="downloaded", keeps_optimizer=True)

    def personal(self, task: Task) -> frozenset[str]:
        return frozenset((*task.parameters, *task.buffers))
