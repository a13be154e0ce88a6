"""FedRoD: Chen and Chao 2022, "On Bridging Generic and Personalized Federated Learning for Image Classification", Eq. 5
to 7, Alg. 1, with linear personal heads.

    client:  generic:   θ = (body f, head h) with the balanced loss  ℓ(h(z) + γ log n_i, y),  z = f(x);
                        n_i: the client's training examples by class
             personal:  head g_i with  ℓ(sg(h(z)) + g_i(sg(z)), y),  sg stops the gradient
             both at once, from the same batch and z
    server:  FedAvg of θ. The client predicts with h(z) + g_i(z), the server with h(z).

g_i has the architecture of the head h and starts as a copy of it. What a wrapper adds before the head is part of z, so
under DBE the bias z^p follows the generic loss. A class without examples counts as 10⁻⁹ examples, so that a loss over
soft labels stays finite. The paper's hypernetwork, which makes g_i from n_i, is not implemented.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.algorithms.personal_heads import head, refuse_without
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only

PREFIX = "personal."
"""The names of g_i's weights are those of h's weights with this prefix."""


def personal_head_names(task: Task) -> frozenset[str]:
    """Return the names of g_i's weights."""
    return frozenset(PREFIX + name for name in task.head_names - task.added_names)


def prefixed(weights: Weights) -> Weights:
    """Return `weights` with the names that g_i's weights would have."""
    return {PREFIX + name: value for name, value in weights.items()}


def with_personal_head(task: Task, weights: Weights) -> Weights:
    """Return `weights` with g_i in the place of h; weights that a wrapper added are those of z, without gradients."""
    own = dict(weights)
    for name, value in weights.items():
        if name in task.added_names:
            own[name] = value.detach()
        if name.startswith(PREFIX):
            own[name.removeprefix(PREFIX)] = value
    return own


@dataclass(frozen=True, kw_only=True)
class FedRoD(FedAvg):
    name = "fedrod"
    reference = "Chen and Chao 2022, Alg. 1, linear head"
    traits = replace(FedAvg.traits, needs_split=True, requires_classes=True, default_eval_point="downloaded")

    gamma: float = option(1.0, low=0, help="γ, power of the class counts; 0 is the plain loss")

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name, ["head"])

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | personal_head_names(task)

    def trained(self, ctx: Context) -> Sequence[str]:
        personal = personal_head_names(ctx.task)
        of_head = [PREFIX + name for name in head(ctx.task)]
        return [*ctx.task.trainable, *(name for name in of_head if name in personal)]

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        initial = prefixed(ctx.task.initial_weights())
        personal_head = only(initial, personal_head_names(ctx.task))
        labels = F.one_hot(ctx.data.train.y.long(), ctx.task.num_outputs)
        client["weights"] = client["weights"] | personal_head
        client["counts"] = labels.sum(0).float()  # [classes]
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        trained = only(work["weights"], self.trained(ctx))
        fresh = ctx.optimizer.init(trained)
        work["optimizer"] = client.get("optimizer", fresh)
        work["prior"] = self.gamma * client["counts"].clamp(min=1e-9).log()
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        task = ctx.task
        output = task.forward(weights, batch.x)
        z = output.features.detach().to(task.feature_dtype)
        logits = output.logits.detach()
        balanced = output.logits + work["prior"]
        generic, output = task.loss_of(weights, output, batch.y, balanced)
        generic, output = task.add_loss_terms(generic, weights, output)

        own = with_personal_head(task, weights)
        personal_logits, buffers = task.model.run(own, lambda model: model.head(z))
        personal = task.loss(logits + personal_logits, batch.y, weights)
        statistics = only(prefixed(buffers), personal_head_names(task))
        return generic + personal, output._replace(buffers=output.buffers | statistics)

    def global_model(self, ctx: Context, server: State) -> Any:
        if ctx.task.personal_names:
            return None
        return server["weights"]

    @torch.no_grad()
    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        if not personal_head_names(ctx.task) <= model.keys():
            return ctx.task.predict(model, x)
        output = ctx.task.forward(model, x, train=False)
        own = with_personal_head(ctx.task, model)
        personal_logits = ctx.task.head(own, output.features, train=False)
        return output.logits + personal_logits
