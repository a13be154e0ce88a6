"""FedMix: Yoon et al. 2021, "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", Alg. 2, Eq. 3.

Clients share means (x̄, ȳ) of a few of their examples. Mixup of x with x̄, to first order in λ, with u = (1−λ) x:

    L = (1−λ) CE(f(u), y) + λ CE(f(u), ȳ) + λ ⟨∂CE(f(u), y)/∂u, x̄⟩     each example, then the mean over the batch
    setup:   every client sends the means of its training data, M examples each; all of them come back to everyone
    rounds:  FedAvg with L

The last term is the first-order one. Code by FedDebias's authors and others has the gradient of (1−λ) CE in it, which
differs in λ², and, taking the gradient of the mean loss and then a mean, shrinks it by the batch size; here neither.
Per step each example meets one mean; the means are gone through in an order drawn anew in each round.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.pseudo_data import labelled_means
from rayfed.algorithms.common.soft_labels import check_real_inputs, check_soft_labels
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class FedMix(FedAvg):
    """Sends means of inputs and of labels once, then weights; clients keep everyone's means. Scored: global."""

    name: ClassVar[str] = "fedmix"
    reference: ClassVar[str] = "Yoon et al. 2021, Alg. 2 and Eq. 3"

    lam: float = option(0.1, low=0, high=1, help="λ, share of the mean in the mixture; 0 is FedAvg")
    mean_examples: int = option(10, low=1, help="M, examples in a mean")
    means: int | None = option(None, low=1, help="means in a step, each with its share of the batch; null: batch size")

    def check(self, problem: ProblemSpec) -> None:
        check_soft_labels(problem, self.name)
        check_real_inputs(problem, self.name)
        least = min(problem.examples, key=lambda i: problem.examples[i])
        if problem.examples[least] < self.mean_examples:
            raise UsageError(
                f"algorithm.mean_examples={self.mean_examples}: client {least} has only {problem.examples[least]} "
                "training examples"
            )

    def init(self, ctx: Context) -> State:
        empty = torch.zeros(0, device=ctx.task.device)
        return super().init(ctx) | {"means": {"x": empty, "y": empty}}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return CollectMeans(self), SendMeans()

    def start(self, ctx: Context, client: State, down: State) -> State:
        order = torch.randperm(len(client["means"]["x"])).to(ctx.task.device)
        return super().start(ctx, client, down) | {"means": client["means"], "order": order}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        order, size = work["order"], len(batch.x)
        count = min(self.means or size, size)
        place = torch.arange(size, device=order.device) % count + ctx.step * count
        rows = order[place % len(order)]
        x, y = (work["means"][name][rows] for name in ("x", "y"))

        def own(inputs: Weights) -> tuple[Tensor, Output]:
            output = ctx.task.forward(weights, inputs["u"])
            return ctx.task.loss(output.logits, batch.y), output

        slopes, loss, output = gradients(own, {"u": (1 - self.lam) * batch.x}, create_graph=True)
        loss = (1 - self.lam) * loss + self.lam * ctx.task.loss(output.logits, y)
        loss = loss + self.lam * (slopes["u"] * x).sum()  # slopes are of the mean: 1/batch is in them
        return ctx.task.add_loss_terms(loss, weights, output)


@dataclass(frozen=True)
class CollectMeans(Exchange):
    """Setup: every client sends the means of its inputs and labels."""

    method: FedMix

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        x, y = labelled_means(data.train, self.method.mean_examples, ctx.task.num_classes)
        return client, {"means": {"x": x, "y": y}}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        sent = [reply.up["means"] for reply in replies.each]
        return server | {"means": {name: torch.cat([means[name] for means in sent]) for name in ("x", "y")}}


class SendMeans(Exchange):
    """Setup: every client receives the means of all clients and keeps them."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"means": server["means"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"means": down["means"]}, {}
