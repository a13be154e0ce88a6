"""pFedMe: Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes", Alg. 1.

    client:  w_i ← w_t.  On each batch, K times  v_i ← v_i − η_p (∇f(v_i) + λ (v_i − w_i) + decay · v_i),
             then  w_i ← w_i − η λ (w_i − v_i);   v_i starts from w_t and continues from batch to batch
    server:  w_{t+1} = (1 − β) w_t + β Σ p_i w_i

The configured optimiser takes the steps of w_i, with η = local.lr; the steps of v_i are plain SGD. Batch-norm
statistics are those of v_i, the only model that processes data; they are averaged whatever β is. `decay` is in the
authors' code only.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import ClientData, Context, Replies, State, Traits
from rayfed.algorithms.ditto import PersonalModel
from rayfed.algorithms.fedprox import pulled
from rayfed.core.optim import clipped
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import add, only, scale, sub, without


@dataclass(frozen=True, kw_only=True)
class PFedMe(PersonalModel):
    """The v_i after the client's last local training is scored."""

    name: ClassVar[str] = "pfedme"
    reference: ClassVar[str] = "Dinh, Tran and Nguyen 2020, Alg. 1"
    traits: ClassVar[Traits] = replace(PersonalModel.traits, supports_loss_terms=False)

    lam: float = option(15.0, low=0, help="λ, pull of v_i towards w_i", elsewhere={"authors": "15", "PFLlib": "1"})
    inner_steps: int = option(5, low=1, help="K, steps of v_i per batch", elsewhere={"authors": "5", "PFLlib": "5"})
    personal_lr: float = option(
        0.09,
        above=0,
        help="η_p, step size of v_i",
        elsewhere={"authors": "0.09 (0.1 and 0.01 for their convex models)", "PFLlib": "0.01"},
    )
    beta: float = option(
        1.0, above=0, help="β, the server's step towards the mean", elsewhere={"authors": "1", "PFLlib": "0"}
    )
    decay: float = option(0.001, low=0, help="weight decay of v_i", elsewhere={"authors": "0.001", "PFLlib": "0.001"})

    def start(self, ctx: Context, client: State, down: State) -> State:
        personal = self.personal(ctx.task)
        names = [name for name in ctx.task.trainable if name not in personal]
        weights = down["weights"] | client["weights"]
        optimizer = client.get("optimizer", ctx.optimizer.init(only(weights, names)))
        return {"model": weights, "local": only(weights, names), "optimizer": optimizer}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        model, local = work["model"], work["local"]
        for _ in range(self.inner_steps):
            grads, loss, buffers = ctx.task.gradients(model, batch)
            if ctx.optimizer.clip_norm is not None:
                grads = clipped(grads, ctx.optimizer.clip_norm)
            grads = add(pulled(grads, model, local, self.lam), only(model, grads), alpha=self.decay)
            model = model | buffers | add(only(model, grads), grads, alpha=-ctx.scaled(self.personal_lr))
        optimizer = replace(ctx.optimizer, clip_norm=None)  # λ (w_i − v_i) is no gradient of the loss
        optimizer.update_(local, scale(sub(local, only(model, local)), self.lam), work["optimizer"])
        return work | {"model": model, "local": local}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return super().finish(ctx, work | {"weights": work["model"] | work["local"]}, client, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        if self.beta == 1:
            return super().aggregate(ctx, server, replies)
        before, mean = only(server["weights"], ctx.task.trainable), replies.mean["weights"]
        moved = add(before, sub(only(mean, before), before), alpha=self.beta)
        return server | {"weights": without(mean, before) | moved}
