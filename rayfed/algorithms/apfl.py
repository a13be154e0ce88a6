"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", Alg. 1, Eq. 7 to 10.

    model of client i:  v̄ = α_i v_i + (1−α_i) w;  on each batch
    paper:  w ← w − η ∇f(w);  v ← v − η α ∇f(v̄);  α ← clip(α − η ⟨v−w, ∇f(v̄)⟩, 0, 1)
    code:   w ← w − η ∇f(w);  v ← v − η ∇f(v);    α ← clip(α − η (⟨v−w, α ∇f(v) + (1−α) ∇f(w)⟩ + 0.02 α), 0, 1);
            after the last batch  v ← v̄
    server: FedAvg of w; v_i and α_i are never sent

`code` is PFLlib's rule, which the comparison of Zhang et al. 2023 (DBE) uses: v is mixed once per round and is itself
the client's model. The step of α takes v − w after the steps of v and w in the code, and before them in the paper. The
authors' code (FedTorch) changes α on the first batch of a round only, PFLlib on every batch (`alpha_updates`).

Batch-norm statistics: in `paper` the data of the client pass through v̄, whose running statistics are kept beside v and
used as they are. In `code` v and w have statistics of their own, which are mixed like their parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, State
from rayfed.algorithms.ditto import PersonalModel
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, scale, sub


@dataclass(frozen=True, kw_only=True)
class APFL(PersonalModel):
    """The client's model is scored: v in `code`, the mixture of v and the w received in `paper`."""

    name: ClassVar[str] = "apfl"
    reference: ClassVar[str] = "Deng, Kamani and Mahdavi 2020, Alg. 1"

    alpha: float = option(
        0.5,
        low=0,
        high=1,
        help="initial α, share of the personal model in the mixture",
        elsewhere={"authors": "0.5", "PFLlib": "1"},
    )
    adapt_alpha: bool = option(
        True, help="learn α together with the models", elsewhere={"authors": "false (a flag)", "PFLlib": "true"}
    )
    alpha_updates: str = option(
        "round",
        choices=("round", "step"),
        help="α takes a step once per round, on its first batch, or on every batch",
        elsewhere={"authors": "round", "PFLlib": "step"},
    )
    variant: str = option("code", choices=("code", "paper"), help="rules of PFLlib's code, or of the paper")

    def join(self, ctx: Context) -> State:
        return super().join(ctx) | {"alpha": torch.tensor(self.alpha, device=ctx.task.device)}

    def start(self, ctx: Context, client: State, down: State) -> State:
        return super().start(ctx, client, down) | {"alpha": client["alpha"]}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        task, model, weights, alpha = ctx.task, work["model"], work["weights"], work["alpha"]
        code, names = self.variant == "code", ctx.task.trainable
        grads, loss, buffers = task.gradients(weights, batch)
        point = model if code else self.mixed(ctx, model, weights, alpha)
        # loss terms such as DBE's regulariser concern w only
        model_grads, _, model_buffers = task.without_loss_terms().gradients(point, batch)
        before = difference(model, weights, names)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        ctx.optimizer.update_(model, model_grads if code else scale(model_grads, alpha), work["model_optimizer"])
        adapts = self.adapt_alpha and (ctx.step == 0 or self.alpha_updates == "step")
        if adapts and code:
            mixed_grads = add(scale(model_grads, alpha), scale(grads, 1 - alpha))
            slope = dot(difference(model, weights, names), mixed_grads) + 0.02 * alpha
            alpha = (alpha - ctx.optimizer.lr * slope).clamp(0, 1)
        elif adapts:
            alpha = (alpha - ctx.optimizer.lr * dot(before, model_grads)).clamp(0, 1)
        work = work | {"weights": weights | buffers, "model": model | model_buffers, "alpha": alpha}
        return work, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        mixed = {"model": self.trained_model(ctx, work, client, down)} if self.variant == "code" else {}
        return kept | only(work, ("alpha",)) | mixed, up

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        model = self.personal_model(ctx, client, down)
        if self.variant == "code":
            return model
        return self.mixed(ctx, model, down["weights"] | client["weights"], client["alpha"])

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return self.mixed(ctx, work["model"], work["weights"], work["alpha"])

    def mixed(self, ctx: Context, model: Weights, weights: Weights, alpha: Tensor) -> Weights:
        """Return v̄; in `paper` with the buffers of v, which are those of v̄."""
        if self.variant == "code":
            return mixture(model, weights, alpha)
        return model | mixture(only(model, ctx.task.parameters), weights, alpha)


def difference(model: Weights, weights: Weights, names: Sequence[str]) -> Weights:
    """Return v − w over the weights called `names`."""
    return sub(only(model, names), only(weights, names))


def dot(a: Weights, b: Weights) -> Tensor:
    """Return the scalar ⟨a, b⟩ over all entries of `a`."""
    return torch.stack([(value * b[name]).sum() for name, value in a.items()]).sum()


def mixture(model: Weights, weights: Weights, alpha: Tensor) -> Weights:
    """Return α·model + (1−α)·weights; integer buffers are those of `model`."""
    return {
        name: alpha * value + (1 - alpha) * weights[name] if value.is_floating_point() else value
        for name, value in model.items()
    }
