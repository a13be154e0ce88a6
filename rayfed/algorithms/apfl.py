"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", Alg. 1, Eq. 7 to 10.

    v̄ = α_i v_i + (1−α_i) w, the client's model. For each batch
    paper:  w ← w − η ∇f(w);  v ← v − η α ∇f(v̄);  α ← clip(α − η ⟨v−w, ∇f(v̄)⟩, 0, 1)
    code:   w ← w − η ∇f(w);  v ← v − η ∇f(v);    α ← clip(α − η (⟨v−w, α ∇f(v) + (1−α) ∇f(w)⟩ + 0.02 α), 0, 1);
            after the last batch  v ← v̄
    server: FedAvg of w; v_i and α_i stay

`code` is PFLlib's rule, by which Zhang et al. 2023 (DBE) compare; its v was mixed once a round, and v is its model. In
the code, α's step takes v − w after the steps of v and w, in the paper from before them. An unseen client's v starts from the
w that it receives, as in that work's appendix D.4, everyone else's from the initial weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, scale, sub


@dataclass(frozen=True, kw_only=True)
class APFL(FedAvg):
    """The common model w is sent as in FedAvg; the personal one v and the share α are kept. Scored: v, mixed with w as
    `variant` says. Batch-norm statistics are mixed as weights are."""

    name: ClassVar[str] = "apfl"
    reference: ClassVar[str] = "Deng, Kamani and Mahdavi 2020, Alg. 1"
    default_eval_point: ClassVar[str] = "downloaded"

    alpha: float = option(0.5, low=0, high=1, help="α₀, share of the personal model in the mixture at first")
    adapt_alpha: bool = option(True, help="learn α along with the models")
    variant: str = option("code", choices=("code", "paper"), help="rules of PFLlib's code, or of the paper")

    def join(self, ctx: Context) -> State:
        alpha = torch.tensor(self.alpha, device=ctx.task.device)
        return super().join(ctx) | {"model": ctx.task.initial_weights(), "alpha": alpha}

    def own(self, ctx: Context, client: State, down: State) -> Weights:
        """v of a client that has been sent w."""
        return super().downloaded_model(ctx, client, down) if ctx.unseen else client["model"]

    def start(self, ctx: Context, client: State, down: State) -> State:
        model = self.own(ctx, client, down)
        fresh = ctx.optimizer.init(only(model, ctx.task.trainable))
        own = {"model": model, "alpha": client["alpha"], "model_optimizer": client.get("model_optimizer", fresh)}
        return super().start(ctx, client, down) | own

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        task, model, weights, alpha = ctx.task, work["model"], work["weights"], work["alpha"]
        code, names = self.variant == "code", ctx.task.trainable
        grads, loss, buffers = task.gradients(weights, batch)
        at = model if code else mixed(model, weights, alpha)
        own, _, own_buffers = task.without_loss_terms().gradients(at, batch)  # DBE's regulariser is about w
        before = gap(model, weights, names)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        ctx.optimizer.update_(model, own if code else scale(own, alpha), work["model_optimizer"])
        if self.adapt_alpha and code:
            slope = dot(gap(model, weights, names), add(scale(own, alpha), scale(grads, 1 - alpha))) + 0.02 * alpha
            alpha = (alpha - ctx.optimizer.lr * slope).clamp(0, 1)
        elif self.adapt_alpha:
            alpha = (alpha - ctx.optimizer.lr * dot(before, own)).clamp(0, 1)
        work = work | {"weights": weights | buffers, "model": model | own_buffers, "alpha": alpha}
        return work, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        if self.keep_optimizer:
            kept = kept | {"model_optimizer": work["model_optimizer"]}
        model = self.trained_model(ctx, work, client, down) if self.variant == "code" else work["model"]
        return kept | {"model": model, "alpha": work["alpha"]}, up

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        model = self.own(ctx, client, down)
        if self.variant == "code":
            return model
        return mixed(model, super().downloaded_model(ctx, client, down), client["alpha"])

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return mixed(work["model"], work["weights"], work["alpha"])


def gap(model: Weights, weights: Weights, names: Sequence[str]) -> Weights:
    return sub(only(model, names), only(weights, names))


def dot(a: Weights, b: Weights) -> Tensor:
    """⟨a, b⟩, a scalar, over all entries of `a`."""
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def mixed(model: Weights, weights: Weights, alpha: Tensor) -> Weights:
    """α·model + (1−α)·weights; counters are those of `model`."""
    return {
        name: alpha * value + (1 - alpha) * weights[name] if value.is_floating_point() else value
        for name, value in model.items()
    }
