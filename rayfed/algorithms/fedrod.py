"""FedRoD: Chen and Chao 2022, "On Bridging Generic and Personalized Federated Learning for Image Classification", Eq. 5
to 7, Alg. 1, with linear personal heads.

    client:  generic:   θ = (body f, head h) by the balanced loss  ℓ(h(z) + γ log n_i, y),  z = f(x), n_i the client's
                        numbers of training examples by class
             personal:  head g_i by  ℓ(sg(h(z)) + g_i(sg(z)), y)  with sg: no gradient
             both steps are taken at once, from the same batch and the same z
    server:  FedAvg of θ; the g_i are never sent. The client predicts with h(z) + g_i(z), the server with h(z).

g_i has the form of the head and starts as its copy. A class of
which a client has no example counts as 10⁻⁹ examples: a loss over soft labels stays finite. The paper's hypernetwork,
which makes g_i from n_i, is not here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, State
from rayfed.algorithms.common.split import head, refuse_without
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights, only

OWN = "personal."  # in front of the names of g_i's weights


def own_names(task: Task) -> frozenset[str]:
    return frozenset(OWN + name for name in task.head_names)


def with_own_head(weights: Weights) -> Weights:
    """`weights` with g_i in the place of h."""
    return weights | {name.removeprefix(OWN): value for name, value in weights.items() if name.startswith(OWN)}


@dataclass(frozen=True, kw_only=True)
class FedRoD(FedAvg):
    """Body and generic head are sent, a personal head is kept. Scored: the body and generic head received plus the
    client's personal head. Class counts are those of the whole training part, last short batch included."""

    name: ClassVar[str] = "fedrod"
    reference: ClassVar[str] = "Chen and Chao 2022, Alg. 1, linear head"
    default_eval_point: ClassVar[str] = "downloaded"

    gamma: float = option(1.0, low=0, help="γ, power of the class counts in the balanced loss; 0: the plain loss")

    def check(self, problem: ProblemSpec) -> None:
        refuse_without(problem, self.name, ["head"])

    def personal(self, task: Task) -> frozenset[str]:
        return task.personal_names | own_names(task)

    def trained(self, ctx: Context) -> Sequence[str]:
        return (*ctx.task.trainable, *(OWN + name for name in head(ctx.task)))

    def join(self, ctx: Context) -> State:
        client, initial = super().join(ctx), ctx.task.initial_weights()
        own = {OWN + name: value for name, value in only(initial, ctx.task.head_names).items()}
        return client | {"weights": client["weights"] | own, "counts": class_counts(ctx)}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        fresh = ctx.optimizer.init(only(work["weights"], self.trained(ctx)))
        prior = self.gamma * client["counts"].clamp(min=1e-9).log()
        return work | {"optimizer": client.get("optimizer", fresh), "prior": prior}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        task, output = ctx.task, ctx.task.forward(weights, batch.x)
        z, logits = output.features.detach(), output.logits.detach()
        generic, output = task.add_loss_terms(task.loss(output.logits + work["prior"], batch.y), weights, output)
        own, buffers = task.model.run(with_own_head(weights), lambda model: model.head(z))
        statistics = {OWN + name: value for name, value in buffers.items() if name in task.head_names}
        return generic + task.loss(logits + own, batch.y), output._replace(buffers=output.buffers | statistics)

    def global_model(self, ctx: Context, server: State) -> Any:
        return server["weights"] if not ctx.task.personal_names else None

    @torch.no_grad()
    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        if not own_names(ctx.task) <= model.keys():
            return ctx.task.predict(model, x)
        output = ctx.task.forward(model, x, train=False)
        return output.logits + ctx.task.head(with_own_head(model), output.features, train=False)


def class_counts(ctx: Context) -> Tensor:
    """The client's number of training examples of each class [classes]; of soft labels, their sum."""
    y = ctx.data.train.y
    return (F.one_hot(y.long(), ctx.task.num_classes) if y.dim() == 1 else y).sum(0).float()
