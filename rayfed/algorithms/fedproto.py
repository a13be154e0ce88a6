"""FedProto: Tan et al. 2022, "FedProto: Federated Prototype Learning across Heterogeneous Clients", Alg. 1, Eq. 3 to 7.

    client:  w_i ← w_i − η ∇[CE(x, y) + λ · MSE(f(x), C̄_y)];  the second term is 0 while class y has no C̄_y
             sends C_ic, the mean of f(x) over the examples of class c in the round's steps, and their number
    server:  C̄_c = mean of C_ic over the clients that have class c; a class that no client had this round keeps its C̄_c
    predict: the class whose C̄_c is nearest to f(x)

The steps of a round are those of all local epochs, as in PFLlib; in the authors' code the last epoch counts. The
squared distance is a mean over the width of f, so a suitable λ grows with the width. The paper's formula weighs a class
by the clients' counts; FRAug's description of the baseline does not (`weighting=equal`, the default). Every client
keeps its whole model. With `share_model`, models are averaged as in FedAvg, which the digits of FRAug's table 2
suggest.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Replies, State, Traits
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

    name: ClassVar[str] = "fedproto"
    reference: ClassVar[str] = "Tan et al. 2022, Alg. 1"
    traits: ClassVar[Traits] = replace(
        FedAvg.traits, needs_split=True, requires_hard_labels=True, default_eval_point="downloaded"
    )

    lam: float = option(1.0, low=0, help="λ, weight of the prototypes", elsewhere={"authors": "1", "PFLlib": "1"})
    share_model: bool = option(False, help="also average the models, as FedAvg does")
    weighting: str = weighting_option("equal", "; of prototypes, by those of the class")

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names if self.share_model else frozenset(task.initial_weights())

    def init(self, ctx: Context) -> State:
        task = ctx.task
        width = int(torch.Size(task.feature_shape).numel())
        none = {"means": torch.zeros(task.num_outputs, width), "known": torch.zeros(task.num_outputs)}
        return super().init(ctx) | {"prototypes": {name: value.to(task.device) for name, value in none.items()}}

    def broadcast(self, ctx: Context, server: State) -> State:
        return super().broadcast(ctx, server) | {"prototypes": server["prototypes"]}

    def start(self, ctx: Context, client: State, down: State) -> State:
        means = down["prototypes"]["means"]
        return super().start(ctx, client, down) | {
            "sums": torch.zeros_like(means),
            "counts": torch.zeros(len(means), device=means.device),
        }

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights, prototypes = work["weights"], down["prototypes"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, Tensor, Tensor]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            distance = (z - prototypes["means"][batch.y]).square().mean(1)
            pull = (prototypes["known"][batch.y] * distance).mean()
            return loss + self.lam * pull, (output.buffers, z, pull)

        grads, loss, (buffers, z, pull) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        members = one_hot(batch.y, ctx.task.num_outputs)
        sums, counts = work["sums"] + members.T @ z, work["counts"] + members.sum(0)
        changed = {"weights": weights | buffers, "sums": sums, "counts": counts}
        return work | changed, {"loss": loss, "prototype_distance": pull}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        means = work["sums"] / work["counts"].clamp(min=1)[:, None]
        return kept, up | {"prototypes": {"means": means, "counts": work["counts"]}}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        """Return the model, and the mean prototypes of the classes that clients sent; others stay as they were."""
        sent, old = [reply.up["prototypes"] for reply in replies.each], server["prototypes"]
        means, counts = (torch.stack([each[name].to(ctx.task.device) for each in sent]) for name in ("means", "counts"))
        shares = counts if self.weighting == "examples" else (counts > 0).float()
        total = shares.sum(0)
        averages = (shares[:, :, None] * means).sum(0) / total.clamp(min=1)[:, None]
        prototypes = {
            "means": torch.where(total[:, None] > 0, averages, old["means"]),
            "known": torch.maximum(old["known"], (total > 0).float()),
        }
        return super().aggregate(ctx, server, replies) | {"prototypes": prototypes}

    def global_model(self, ctx: Context, server: State) -> Any:
        weights = super().global_model(ctx, server)
        return None if weights is None else {"weights": weights, "prototypes": server["prototypes"]}

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return {"weights": super().downloaded_model(ctx, client, down), "prototypes": down["prototypes"]}

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return {"weights": work["weights"], "prototypes": down["prototypes"]}

    @torch.no_grad()
    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        means, known = model["prototypes"]["means"], model["prototypes"]["known"] > 0
        features = ctx.task.represent(model["weights"], x)
        distances = (features.flatten(1)[:, None] - means).square().mean(2)
        farthest = torch.where(known, distances, 0).amax(1, keepdim=True)
        logits = -torch.where(known, distances, farthest + 1)
        return torch.where(known.any(), logits, ctx.task.head(model["weights"], features, train=False))
