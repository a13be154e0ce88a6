"""FedAvg: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized Data", Alg. 1.

    client:  w_i ← w_t, then SGD on its own mean loss f_i for E epochs
    server:  w_{t+1} = Σ_i p_i w_i,  p_i = n_i / Σ_j n_j over the cohort

Most methods here are FedAvg with one hook changed; what they may change is `personal` (names that stay with the
client), `trained` (names that this phase trains), `loss`, and `correct` (the gradient before the optimiser sees it).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from rayfed.algorithm import Algorithm, ClientData, Context, Replies, State
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only, without


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm):
    name: ClassVar[str] = "fedavg"
    reference: ClassVar[str] = "McMahan et al. 2017, Alg. 1"
    averaged: ClassVar[tuple[str, ...]] = ("weights",)
    supports_loss_terms: ClassVar[bool] = True

    keep_optimizer: bool = option(False, help="keep the optimiser's moments with the client between rounds")

    def personal(self, task: Task) -> frozenset[str]:
        """Names of the weights that stay with the client: by default what the batch-norm policy says."""
        return task.personal_names

    def trained(self, ctx: Context) -> Sequence[str]:
        """Names of the weights that the phase at hand trains."""
        return ctx.task.trainable

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        return ctx.task.objective(weights, batch)

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        """The gradients that the optimiser is given."""
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

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, Weights]:
            value, output = self.loss(ctx, weights | trained, work, down, batch)
            return value, output.buffers

        grads, loss, buffers = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        names = self.personal(ctx.task)
        kept = {"weights": only(work["weights"], names)}
        if self.keep_optimizer:
            kept["optimizer"] = work["optimizer"]
        return client | kept, {"weights": without(work["weights"], names)}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | {"weights": replies.mean["weights"]}

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """2 · N · S over the N clients of the round, S the bytes of the parameters that travel."""
        sent = without(ctx.task.initial_weights(), self.personal(ctx.task))
        parameters = sum(sent[name].numel() for name in ctx.task.model.parameters if name in sent)
        return 2.0 * len(examples) * 4 * parameters

    def global_model(self, ctx: Context, server: State) -> Any:
        return server["weights"] if not self.personal(ctx.task) else None

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return down["weights"] | client["weights"]

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return work["weights"]
