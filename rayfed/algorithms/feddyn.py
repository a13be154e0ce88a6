"""FedDyn: Acar et al. 2021, "Federated Learning Based on Dynamic Regularization", Alg. 1, Eq. 1.

    client:  min over w of  f_i(w) − ⟨g_i, w⟩ + (α/2)‖w − w_t‖²,  w_t the weights received, by local training
             g_i ← g_i − α (w_i − w_t),  so that g_i → ∇f_i at a fixed point
    server:  h ← h − α/N · Σ (w_i − w_t) over the cohort;   w_{t+1} = mean w_i − h/α   (unweighted, N: all clients)

The regulariser applies to weights that are trained and sent; batch-norm statistics are averaged.

Clients start from w_t, the authors' "cloud model". Their code scores the mean of the models that the clients of the
round have sent, without h (`scored=mean`, the default). It also scores the mean of the last models of all clients,
which is not offered here. Alg. 1 returns w_t (`scored=cloud`).
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from rayfed.algorithm import ClientData, Context, Finished, Replies, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.fedprox import pulled
from rayfed.core.options import option
from rayfed.core.trees import Weights, add, only, sub, without, zeros_like


@dataclass(frozen=True, kw_only=True)
class FedDyn(FedAvg):
    name = "feddyn"
    reference = "Acar et al. 2021, Alg. 1"
    weighting: ClassVar[str] = "equal"  # type: ignore[misc]  # as Alg. 1
    traits = replace(FedAvg.traits, assumes_uniform_sampling=True)

    alpha: float = option(
        0.01, above=0, help="α, strength of the dynamic regulariser", elsewhere={"authors": "0.01", "PFLlib": "1"}
    )
    scored: str = option(
        "mean",
        choices=("mean", "cloud"),
        help="global model: mean of clients' models, or the w_t sent",
        elsewhere={"authors": "mean", "PFLlib": "cloud"},
    )

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        weights = server["weights"]
        server["h"] = zeros_like(only(weights, ctx.task.trainable))
        if self.scored == "mean":
            server["mean"] = weights
        return server

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        trainable = only(ctx.task.initial_weights(), ctx.task.trainable)
        client["g"] = zeros_like(without(trainable, self.personal(ctx.task)))
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        work["g"] = client["g"]
        return work

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        g = work["g"]
        linear = sub(only(grads, g), only(g, grads))
        return pulled(grads | linear, work["weights"], down["weights"], self.alpha)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        g = client["g"]
        after = only(up["weights"], g)
        before = only(down["weights"], g)
        kept["g"] = add(g, sub(after, before), alpha=-self.alpha)
        return kept, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        mean = replies.mean["weights"]
        h = server["h"]
        moved = sub(only(mean, h), only(server["weights"], h))
        share = len(replies.each) / ctx.task.num_clients
        h = add(h, moved, alpha=-self.alpha * share)
        cloud = add(only(mean, h), h, alpha=-1 / self.alpha)
        server = server | {"weights": mean | cloud, "h": h}
        if self.scored == "mean":
            server["mean"] = mean
        return server

    def global_model(self, ctx: Context, server: State) -> Any:
        model = super().global_model(ctx, server)
        if model is not None and self.scored == "mean":
            return server["mean"]
        return model
