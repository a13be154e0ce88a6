"""FedProto: Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients", Alg. 1, Eq. 3 to 7.

    client:  w_i ← w_i − η ∇[CE(x, y) + λ · MSE(f(x), C̄_y)];  the second term is 0 while class y has no C̄_y
             sends C_ic, the mean of f(x) over the examples of class c in the round's steps, and their number
    server:  C̄_c = mean of C_ic over the clients that have class c; a class that no client had this round keeps its C̄_c
    predict: the class whose C̄_c is nearest to f(x)

The steps of a round are those of all local epochs, as in PFLlib; in the authors' code the last epoch counts. The
squared distance is a mean over the width of f, so a suitable λ grows with the width. The paper's formula weighs a class
by the clients' counts; FRAug's description of the baseline does not (`weighting=equal`, the default). Every client
keeps its whole model. With `share_model`, FedAvg averages the models, which the digits of FRAug's table 2 suggest.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, Replies, State, Stepped
from rayfed.algorithms.common.client_weights import weighting_option
from rayfed.algorithms.common.soft_labels import one_hot
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class FedProto(FedAvg):
    """Classes without a prototype are never predicted; without any prototype, the head predicts."""

    name = "fedproto"
    reference = "Tan et al. 2022, Alg. 1"
    traits = replace(FedAvg.traits, needs_split=True, requires_hard_labels=True, default_eval_point="downloaded")

    lam: float = option(1.0, low=0, help="λ, weight of the prototypes", elsewhere={"authors": "1", "PFLlib": "1"})
    share_model: bool = option(False, help="also average the models, as FedAvg does")
    weighting: str = weighting_option("equal", "; of prototypes, by those of the class")

    def personal(self, task: Task) -> frozenset[str]:
        if self.share_model:
            return task.personal_names
        return frozenset(task.initial_weights())

    def init(self, ctx: Context) -> State:
        classes = ctx.task.num_outputs
        width = math.prod(ctx.task.feature_shape)
        device = ctx.task.device
        means = torch.zeros(classes, width, device=device)
        known = torch.zeros(classes, device=device)
        server = super().init(ctx)
        server["prototypes"] = {"means": means, "known": known}
        return server

    def broadcast(self, ctx: Context, server: State) -> State:
        down = super().broadcast(ctx, server)
        down["prototypes"] = server["prototypes"]
        return down

    def start(self, ctx: Context, client: State, down: State) -> State:
        means = down["prototypes"]["means"]
        work = super().start(ctx, client, down)
        work["sums"] = torch.zeros_like(means)
        work["counts"] = torch.zeros(len(means), device=means.device)
        return work

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]
        prototypes = down["prototypes"]["means"][batch.y]
        known = down["prototypes"]["known"][batch.y]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor, Tensor]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            distance = (z - prototypes).square().mean(1)
            pull = (known * distance).mean()
            return loss + self.lam * pull, (output.buffers, z, pull)

        trained = only(weights, self.trained(ctx))
        grads, loss, (buffers, z, pull) = gradients(objective, trained)
        grads = self.correct(ctx, grads, work, down)
        ctx.optimizer.update_(weights, grads, work["optimizer"])
        members = one_hot(batch.y, ctx.task.num_outputs)
        sums = work["sums"] + members.T @ z
        counts = work["counts"] + members.sum(0)
        changed = {"weights": weights | buffers, "sums": sums, "counts": counts}
        return work | changed, {"loss": loss, "prototype_distance": pull}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        counts = work["counts"]
        means = work["sums"] / counts.clamp(min=1)[:, None]
        up["prototypes"] = {"means": means, "counts": counts}
        return kept, up

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """Return the model, and the mean prototypes of the classes that clients sent; others stay as they were."""
        sent = [reply.up["prototypes"] for reply in replies.each]
        means = torch.stack([each["means"] for each in sent])
        counts = torch.stack([each["counts"] for each in sent])
        device = ctx.task.device
        means = means.to(device)
        counts = counts.to(device)
        shares = counts
        if self.weighting == "equal":
            shares = (counts > 0).float()
        total = shares.sum(0)
        weighted = shares[:, :, None] * means
        averages = weighted.sum(0) / total.clamp(min=1)[:, None]
        is_sent = total > 0
        old = server["prototypes"]
        prototypes = {
            "means": torch.where(is_sent[:, None], averages, old["means"]),
            "known": torch.maximum(old["known"], is_sent.float()),
        }
        return super().aggregate(ctx, server, replies) | {"prototypes": prototypes}

    def global_model(self, ctx: Context, server: State) -> Any:
        weights = super().global_model(ctx, server)
        if weights is None:
            return None
        return {"weights": weights, "prototypes": server["prototypes"]}

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        weights = super().downloaded_model(ctx, client, down)
        return {"weights": weights, "prototypes": down["prototypes"]}

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return {"weights": work["weights"], "prototypes": down["prototypes"]}

    @torch.no_grad()
    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        means = model["prototypes"]["means"]
        known = model["prototypes"]["known"] > 0
        features = ctx.task.represent(model["weights"], x)
        z = features.flatten(1)
        differences = z[:, None] - means
        distances = differences.square().mean(2)
        farthest = torch.where(known, distances, 0).amax(1, keepdim=True)
        nearness = -torch.where(known, distances, farthest + 1)
        of_head = ctx.task.head(model["weights"], features, train=False)
        return torch.where(known.any(), nearness, of_head)
