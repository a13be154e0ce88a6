"""pFedMe: Dinh, Tran and Nguyen 2020, "Personalized Federated Learning with Moreau Envelopes", Alg. 1.

    client:  w_i ← w_t.  On each batch, K times  v_i ← v_i − η_p (∇f(v_i) + λ (v_i − w_i) + decay · v_i),
             then  w_i ← w_i − η λ (w_i − v_i);   v_i starts from w_t and continues from batch to batch
    server:  w_{t+1} = (1 − β) w_t + β Σ p_i w_i

The configured optimiser takes the steps of w_i, with η = local.lr; the steps of v_i are plain SGD. Batch-norm
statistics are those of v_i, the only model that processes data; they are averaged whatever β is. `decay` is in the
authors' code only.
"""

from dataclasses import dataclass, replace

from rayfed.algorithm import ClientData, Context, Finished, Replies, State, Stepped
from rayfed.algorithms.ditto import PersonalModel
from rayfed.algorithms.fedprox import pulled
from rayfed.core.optim import clipped
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import add, only, scale, sub, without


@dataclass(frozen=True, kw_only=True)
class PFedMe(PersonalModel):
    """The v_i after the client's last local training is scored."""

    name = "pfedme"
    reference = "Dinh, Tran and Nguyen 2020, Alg. 1"
    traits = replace(PersonalModel.traits, supports_loss_terms=False)

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
        weights = down["weights"] | client["weights"]
        trained = only(weights, ctx.task.trainable)
        local = without(trained, self.personal(ctx.task))
        fresh = ctx.optimizer.init(local)
        return {"model": weights, "local": local, "optimizer": client.get("optimizer", fresh)}

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        v = work["model"]
        w = work["local"]
        for _ in range(self.inner_steps):
            grads, loss, buffers = ctx.task.gradients(v, batch)
            if ctx.optimizer.clip_norm is not None:
                grads = clipped(grads, ctx.optimizer.clip_norm)
            trained = only(v, grads)
            slope = pulled(grads, v, w, self.lam)
            slope = add(slope, trained, alpha=self.decay)
            moved = add(trained, slope, alpha=-ctx.scaled(self.personal_lr))
            v = v | buffers | moved
        optimizer = replace(ctx.optimizer, clip_norm=None)  # λ (w_i − v_i) is no gradient of the loss
        distance = sub(w, only(v, w))
        optimizer.update_(w, scale(distance, self.lam), work["optimizer"])
        return work | {"model": v, "local": w}, {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        weights = work["model"] | work["local"]
        return super().finish(ctx, work | {"weights": weights}, client, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        if self.beta == 1:
            return super().aggregate(ctx, server, replies)
        mean = replies.mean["weights"]
        before = only(server["weights"], ctx.task.trainable)
        change = sub(only(mean, before), before)
        moved = add(before, change, alpha=self.beta)
        return server | {"weights": without(mean, before) | moved}
