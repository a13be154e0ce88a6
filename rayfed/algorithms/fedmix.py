"""FedMix: Yoon et al. 2021, "FedMix: Approximation of Mixup under Mean Augmented Federated Learning", Alg. 2, Eq. 3.

Clients share means (x̄, ȳ) of small groups of their examples. The loss approximates Mixup of x with x̄ to first order
in λ, with u = (1−λ) x:

    L = (1−λ) CE(f(u), y) + λ CE(f(u), ȳ) + λ ⟨∂CE(f(u), y)/∂u, x̄⟩     for each example, averaged over the batch
    setup:   every client sends means of M training examples each; the server sends all to all
    rounds:  FedAvg with L

In a step each example is mixed with one mean; every round uses the means in a new random order.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, HandOut, ProblemSpec, Replies, State, Traits
from rayfed.algorithms.common.soft_labels import check_real_inputs, soft
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Output, Task
from rayfed.core.trees import Weights


@dataclass(frozen=True, kw_only=True)
class FedMix(FedAvg):
    name: ClassVar[str] = "fedmix"
    reference: ClassVar[str] = "Yoon et al. 2021, Alg. 2 and Eq. 3"
    traits: ClassVar[Traits] = replace(FedAvg.traits, computes_with_inputs=True, mixes_labels=True)

    lam: float = option(0.1, low=0, high=1, help="λ, share of the mean in the mixture; 0: FedAvg")
    mean_examples: int = option(10, low=1, help="M, examples per mean")

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)
        count, client = min((count, client) for client, count in problem.examples.items())
        if count < self.mean_examples:
            raise UsageError(f"algorithm.mean_examples={self.mean_examples}: client {client} has only {count} examples")

    def init(self, ctx: Context) -> State:
        empty = torch.zeros(0, device=ctx.task.device)
        return super().init(ctx) | {"means": {"x": empty, "y": empty}}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return CollectMeans(self), HandOut(("means",))

    def start(self, ctx: Context, client: State, down: State) -> State:
        order = torch.randperm(len(client["means"]["x"])).to(ctx.task.device)
        return super().start(ctx, client, down) | {"means": client["means"], "order": order}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        order, size = work["order"], len(batch.x)
        positions = torch.arange(size, device=order.device) + ctx.step * size
        rows = order[positions % len(order)]
        x, y = (work["means"][name][rows] for name in ("x", "y"))

        def local_loss(inputs: Weights) -> tuple[Tensor, Output]:
            output = ctx.task.forward(weights, inputs["u"])
            return ctx.task.loss_of(weights, output, batch.y, output.logits)

        slopes, loss, output = gradients(local_loss, {"u": (1 - self.lam) * batch.x}, create_graph=True)
        loss = (1 - self.lam) * loss + self.lam * ctx.task.loss(output.logits, y, weights)
        loss = loss + self.lam * (slopes["u"] * x).sum()  # as gradients of the mean loss, they contain 1/batch
        return ctx.task.add_loss_terms(loss, weights, output)


@dataclass(frozen=True)
class CollectMeans(Exchange):
    """Setup: every client sends the means of its inputs and labels."""

    method: FedMix

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        x, y = labelled_means(data.train, self.method.mean_examples, ctx.task)
        return client, {"means": {"x": x, "y": y}}

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        sent = [reply.up["means"] for reply in replies.each]
        return server | {"means": {name: torch.cat([means[name] for means in sent]) for name in ("x", "y")}}


def labelled_means(part: Any, size: int, task: Task) -> tuple[Tensor, Tensor]:
    """Return means of `part` over random groups of `size` examples: (inputs [n, *shape], labels [n, classes, ...]).

    Examples beyond the last complete group are not used.
    """
    rows = torch.randperm(len(part))
    rows = rows[: len(rows) // size * size]
    means = [(batch.x.mean(0), soft(batch.y, task).mean(0)) for batch in part.batches(size, rows)]
    x, y = (torch.stack(values) for values in zip(*means, strict=True))
    return x, y
