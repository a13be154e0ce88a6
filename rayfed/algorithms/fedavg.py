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

from rayfed.algorithm import Algorithm, ClientData, Context, Finished, Replies, State, Stepped
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.core.private_gradients import batch_gradients
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, numel, only, without


@dataclass(frozen=True, kw_only=True)
class LocalTraining(Algorithm):
    """FedAvg without the choice of `weighting`, for methods that do not average by it."""

    averaged: ClassVar[tuple[str, ...]] = ("weights",)
    traits = replace(Algorithm.traits, supports_loss_terms=True, keeps_optimizer=False)

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
        weights = ctx.task.initial_weights()
        return {"weights": without(weights, self.personal(ctx.task))}

    def join(self, ctx: Context) -> State:
        weights = ctx.task.initial_weights()
        return {"weights": only(weights, self.personal(ctx.task))}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"weights": server["weights"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        weights = down["weights"] | client["weights"]
        trained = only(weights, ctx.task.trainable)
        fresh = ctx.optimizer.init(trained)
        return {"weights": weights, "optimizer": client.get("optimizer", fresh)}

    def loss_gradients(
        self, ctx: Context, trained: Weights, work: State, down: State, batch: Batch
    ) -> tuple[Weights, Tensor, Weights]:
        """Return (∇ `loss` at the weights `trained`, the loss, the network's next buffers)."""

        def objective(trained: Weights, batch: Batch) -> tuple[Tensor, Weights]:
            weights = work["weights"] | trained
            value, output = self.loss(ctx, weights, work, down, batch)
            return value, output.buffers

        return batch_gradients(objective, trained, batch)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]
        trained = only(weights, self.trained(ctx))
        grads, loss, buffers = self.loss_gradients(ctx, trained, work, down, batch)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        weights = work["weights"]
        personal = self.personal(ctx.task)
        kept = client | {"weights": only(weights, personal)}
        if ctx.keep_optimizer:
            kept["optimizer"] = work["optimizer"]
        return kept, {"weights": without(weights, personal)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"weights": replies.mean["weights"]}

    def global_model(self, ctx: Context, server: State) -> Any:
        if self.personal(ctx.task):
            return None
        return server["weights"]

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return down["weights"] | client["weights"]

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return work["weights"]


@dataclass(frozen=True, kw_only=True)
class FedAvg(LocalTraining):
    name = "fedavg"
    reference = "McMahan et al. 2017, Alg. 1"

    weighting: str = weighting_option("examples")

    def weight(self, ctx: Context, examples: int) -> float:
        return 1.0 if self.weighting == "equal" else float(examples)

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return 2 · N · S for N clients of the round and S bytes of parameters that are sent."""
        sent = without(ctx.task.initial_weights(), self.personal(ctx.task))
        parameters = only(sent, ctx.task.parameters)
        return 2.0 * len(examples) * 4 * numel(parameters)


@dataclass(frozen=True, kw_only=True)
class FedAvgFT(FedAvg):
    name = "fedavg_ft"
    reference = "Collins et al. 2022"
    traits = replace(FedAvg.traits, default_eval_point="adapted")

    bytes_formula = FedAvg.bytes_formula


@dataclass(frozen=True, kw_only=True)
class PFedAvg(FedAvg):
    name = "pfedavg"
    reference = "Chen et al. 2023 (FRAug), table 2, baseline pFedAvg"
    traits = replace(FedAvg.traits, default_eval_point="trained")


@dataclass(frozen=True, kw_only=True)
class Solo(LocalTraining):
    name = "solo"
    reference = "Li, He and Song 2023 (ADCOL), section 5, baseline SOLO"
    traits = replace(LocalTraining.traits, default_eval_point="downloaded", keeps_optimizer=True)

    def personal(self, task: Task) -> frozenset[str]:
        return frozenset((*task.parameters, *task.buffers))
