"""APFL: Deng, Kamani and Mahdavi 2020, "Adaptive Personalized Federated Learning", Alg. 1, Eq. 7 to 10.

    model of client i:  v̄ = α_i v_i + (1−α_i) w;  on each batch
    paper:  w ← w − η ∇f(w);  v ← v − η α ∇f(v̄);  α ← clip(α − η ⟨v−w, ∇f(v̄)⟩, 0, 1)
    code:   w ← w − η ∇f(w);  v ← v − η ∇f(v);    α ← clip(α − η (⟨v−w, α ∇f(v) + (1−α) ∇f(w)⟩ + 0.02 α), 0, 1);
            after the last batch  v ← v̄
    server: FedAvg of w; v_i and α_i are never sent

`code` is PFLlib's rule, which the comparison of Zhang et al. 2023 (DBE) uses: v is mixed once per round and is itself
the client's model. The step of α takes v − w after the steps of v and w in the code, and before them in the paper. The
authors' code (FedTorch) changes α on the first batch of a round only, PFLlib on every batch (`alpha_updates`).

Batch-norm statistics: in `paper` the data of the client pass through v̄. Its running statistics are kept beside v and
used as they are. In `code` v and w have statistics of their own, which are mixed like their parameters.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, State, Stepped
from rayfed.algorithms.ditto import PersonalModel
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, dot, only, scale, sub


@dataclass(frozen=True, kw_only=True)
class APFL(PersonalModel):
    """The client's model is scored: v in `code`, the mixture of v and the w received in `paper`."""

    name = "apfl"
    reference = "Deng, Kamani and Mahdavi 2020, Alg. 1"

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
        client = super().join(ctx)
        client["alpha"] = torch.tensor(self.alpha, device=ctx.task.device)
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work["alpha"] = client["alpha"]
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        v = work["model"]
        w = work["weights"]
        alpha = work["alpha"]
        grads_w, loss, buffers_w = ctx.task.gradients(w, batch)
        point = v
        if self.variant == "paper":
            point = self.mixed(ctx, v, w, alpha)
        # loss terms such as DBE's regulariser concern w only
        grads, _, buffers_v = ctx.task.without_loss_terms().gradients(point, batch)
        grads_v = grads
        if self.variant == "paper":
            grads_v = scale(grads, alpha)

        before = difference(v, w, ctx.task.trainable)
        ctx.optimizer.update_(w, grads_w, work["optimizer"])
        ctx.optimizer.update_(v, grads_v, work["model_optimizer"])
        if self.adapt_alpha and (ctx.step == 0 or self.alpha_updates == "step"):
            if self.variant == "paper":
                slope = dot(before, grads)
            else:
                after = difference(v, w, ctx.task.trainable)
                mixed_grads = add(scale(grads_v, alpha), scale(grads_w, 1 - alpha))
                slope = dot(after, mixed_grads) + 0.02 * alpha
            alpha = (alpha - ctx.optimizer.lr * slope).clamp(0, 1)
        w = w | buffers_w
        v = v | buffers_v
        return work | {"weights": w, "model": v, "alpha": alpha}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["alpha"] = work["alpha"]
        if self.variant == "code":
            kept["model"] = self.trained_model(ctx, work, client, down)
        return kept, up

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        model = self.personal_model(ctx, client, down)
        if self.variant == "code":
            return model
        weights = down["weights"] | client["weights"]
        return self.mixed(ctx, model, weights, client["alpha"])

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return self.mixed(ctx, work["model"], work["weights"], work["alpha"])

    def mixed(self, ctx: Context, model: Weights, weights: Weights, alpha: Tensor) -> Weights:
        """Return v̄; in `paper` with the buffers of v, which are those of v̄."""
        if self.variant == "code":
            return mixture(model, weights, alpha)
        parameters = only(model, ctx.task.parameters)
        return model | mixture(parameters, weights, alpha)


def difference(model: Weights, weights: Weights, names: Sequence[str]) -> Weights:
    """Return v − w over the weights called `names`."""
    return sub(only(model, names), only(weights, names))


def mixture(model: Weights, weights: Weights, alpha: Tensor) -> Weights:
    """Return α·model + (1−α)·weights; integer buffers are those of `model`."""
    mixed = dict(model)
    for name, value in model.items():
        if value.is_floating_point():
            other = weights[name]
            mixed[name] = alpha * value + (1 - alpha) * other
    return mixed
