"""SCAFFOLD, option II: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging", Alg. 1, Eq. 3 to 5.

    client:  y ← x, then K steps  y ← y − η (g(y) − c_i + c)
             c_i⁺ = c_i − c + (x − y) / (K η);  sends Δy = y − x and Δc = c_i⁺ − c_i
    server:  x ← x + η_s · mean Δy;  c ← c + |S|/N · mean Δc   (unweighted means, as in Alg. 1)

With momentum or Adam, (x − y)/(K η) is not a mean gradient. The mean of the raw gradients is used instead, which is the
same under plain SGD. `weighting=examples` weighs both means by the clients' examples, as FLamby does. Weights that are
trained and sent have control variates; batch-norm statistics are averaged.
"""

from dataclasses import dataclass, replace

import torch

from rayfed.algorithm import ClientData, Context, Finished, Replies, State, Stepped
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.optim import add_
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, add, only, scale, sub, without, zeros_like


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    name = "scaffold"
    reference = "Karimireddy et al. 2020, Alg. 1, option II"
    traits = replace(FedAvg.traits, assumes_uniform_sampling=True)
    averaged = ("delta", "delta_c", "buffers")

    weighting: str = weighting_option("equal")
    server_lr: float = option(1.0, above=0, help="η_s, server learning rate", elsewhere={"PFLlib": "1"})

    def controlled(self, task: Task, weights: Weights) -> Weights:
        """Return those of `weights` that have control variates: the trained ones that are sent."""
        return without(only(weights, task.trainable), self.personal(task))

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        server["c"] = zeros_like(self.controlled(ctx.task, server["weights"]))
        return server

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        weights = ctx.task.initial_weights()
        client["c"] = zeros_like(self.controlled(ctx.task, weights))
        return client

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"weights": server["weights"], "c": server["c"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        drift = sub(down["c"], client["c"])
        work["drift"] = drift
        work["steps"] = torch.zeros((), device=ctx.task.device)
        if not ctx.optimizer.is_plain_sgd:
            work["total"] = zeros_like(drift)
        return work

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        controlled = only(grads, work["drift"])
        if "total" in work:
            totals = only(work["total"], controlled)
            add_(list(totals.values()), list(controlled.values()))
        drift = only(work["drift"], controlled)
        return grads | add(controlled, drift)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        work, metrics = super().step(ctx, work, down, batch)
        steps = work["steps"] + 1
        return work | {"steps": steps}, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        names = client["c"]
        after = only(up["weights"], names)
        before = only(down["weights"], names)
        delta = sub(after, before)
        steps = work["steps"]
        if "total" in work:
            c = scale(work["total"], 1 / steps)
        else:
            mean_step = scale(delta, -1 / (steps * ctx.optimizer.lr))
            c = sub(mean_step, work["drift"])
        kept["c"] = c
        delta_c = sub(c, client["c"])
        buffers = without(up["weights"], names)
        return kept, {"delta": delta, "delta_c": delta_c, "buffers": buffers}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        delta = replies.mean["delta"]
        delta_c = replies.mean["delta_c"]
        moved = add(only(server["weights"], delta), delta, alpha=self.server_lr)
        share = len(replies.each) / ctx.task.num_clients
        c = add(server["c"], delta_c, alpha=share)
        return server | {"weights": moved | replies.mean["buffers"], "c": c}
