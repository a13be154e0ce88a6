"""SCAFFOLD, option II: Karimireddy et al. 2020, "SCAFFOLD: Stochastic Controlled Averaging", Alg. 1, Eq. 3 to 5.

    client:  y ← x, then K steps  y ← y − η (g(y) − c_i + c)
             c_i⁺ = c_i − c + (x − y) / (K η);  sends Δy = y − x and Δc = c_i⁺ − c_i
    server:  x ← x + η_s · mean Δy;  c ← c + |S|/N · mean Δc   (unweighted means)

With momentum or Adam, (x − y)/(K η) is not a mean gradient. The mean of the raw gradients is used instead, which is the
same under plain SGD. Weights that are trained and sent have control variates; batch-norm statistics are averaged.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Replies, State, Traits
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.optim import add_
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, add, only, scale, sub, without, zeros_like


@dataclass(frozen=True, kw_only=True)
class Scaffold(FedAvg):
    name: ClassVar[str] = "scaffold"
    reference: ClassVar[str] = "Karimireddy et al. 2020, Alg. 1, option II"
    weighting: ClassVar[str] = "equal"  # type: ignore[misc]  # as Alg. 1
    traits: ClassVar[Traits] = replace(FedAvg.traits, assumes_uniform_sampling=True)
    averaged: ClassVar[tuple[str, ...]] = ("delta", "delta_c", "buffers")

    server_lr: float = option(1.0, above=0, help="η_s, server learning rate", elsewhere={"PFLlib": "1"})

    def controlled(self, task: Task) -> tuple[str, ...]:
        """Return the names of the weights with control variates."""
        personal = self.personal(task)
        return tuple(name for name in task.trainable if name not in personal)

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        return server | {"c": zeros_like(only(server["weights"], self.controlled(ctx.task)))}

    def join(self, ctx: Context) -> State:
        names = self.controlled(ctx.task)
        return super().join(ctx) | {"c": zeros_like(only(ctx.task.initial_weights(), names))}

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"weights": server["weights"], "c": server["c"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        drift = sub(down["c"], client["c"])
        scratch = {"drift": drift, "steps": torch.zeros((), device=ctx.task.device)}
        if not ctx.optimizer.is_plain_sgd:
            scratch["total"] = zeros_like(drift)
        return super().start(ctx, client, down) | scratch

    def correct(self, ctx: Context, grads: Weights, work: State, down: State) -> Weights:
        controlled = only(grads, work["drift"])
        if "total" in work:
            add_(list(only(work["total"], controlled).values()), list(controlled.values()))
        return grads | add(controlled, only(work["drift"], controlled))

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        work, metrics = super().step(ctx, work, down, batch)
        return work | {"steps": work["steps"] + 1}, metrics

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        names = client["c"]
        delta = sub(only(up["weights"], names), only(down["weights"], names))
        if "total" in work:
            c = scale(work["total"], 1 / work["steps"])
        else:
            c = sub(scale(delta, -1 / (work["steps"] * ctx.optimizer.lr)), work["drift"])
        return kept | {"c": c}, {
            "delta": delta,
            "delta_c": sub(c, client["c"]),
            "buffers": without(up["weights"], names),
        }

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        mean, share = replies.mean, len(replies.each) / ctx.task.num_clients
        moved = add(only(server["weights"], mean["delta"]), mean["delta"], alpha=self.server_lr)
        return server | {"weights": moved | mean["buffers"], "c": add(server["c"], mean["delta_c"], alpha=share)}
