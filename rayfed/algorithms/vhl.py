"""VHL: Tang et al. 2022, "Virtual Homogeneity Learning: Defending against Data Heterogeneity in Federated Learning",
Eq. 5, with the alignment loss of its code (`proxy_align_loss`, features detached, contrast among virtual data).

Everyone has the same labelled virtual data (v, y_v), made of noise. z are unit features, sg stops the gradient.

    client:  L = CE(x, y) + α CE(v, y_v) + S({z(x), sg z(v)}) + 0.1 S({z(v)})
    S:       supervised contrastive loss: mean over anchors a of −mean over b of a's class, b ≠ a, of
             log[exp(z_a·z_b/τ) / Σ_{c≠a} exp(z_a·z_c/τ)]; an anchor alone in its class adds 0 to the mean
    server:  FedAvg; before the first round the virtual data goes to everyone, once

The paper draws the virtual images from an untrained StyleGAN2. Here a smaller random network stands in for it: it is
fixed, takes noise and a code of the class, and is never trained. In its code the virtual classes have outputs of their
own, C beside the C local ones, and the alignment matches them; here they share the local outputs. It also puts both
kinds of data through the network as one batch, which batch norm notices, and aligns in the first five local epochs
only. (In the copy of that code by the authors of FedDebias virtual labels match no local ones.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, State
from rayfed.algorithms.common.virtual_data import virtual_data
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


def contrast(z: Tensor, y: Tensor, temperature: float) -> Tensor:
    """S of unit features z [n, d] with classes y [n]."""
    apart = ~torch.eye(len(z), dtype=torch.bool, device=z.device)
    logits = (z @ z.T / temperature).masked_fill(~apart, float("-inf"))
    friends = (y[:, None] == y) & apart
    logs = F.log_softmax(logits, 1).masked_fill(~friends, 0.0).sum(1)
    return -(logs / friends.sum(1).clamp(min=1)).mean()


@dataclass(frozen=True, kw_only=True)
class VHL(FedAvg):
    """Receives the virtual data once and keeps it; sends weights. Scored: the global model."""

    name: ClassVar[str] = "vhl"
    reference: ClassVar[str] = "Tang et al. 2022, Eq. 5, with a random network in place of StyleGAN2"
    requires_hard_labels: ClassVar[bool] = True

    alpha: float = option(1.0, low=0, help="α, weight of the virtual data's cross-entropy")
    align: float = option(1.0, low=0, help="weight of both contrastive terms; 0: virtual data without alignment")
    temperature: float = option(0.07, above=0, help="τ of the contrastive loss")
    virtual: int = option(
        2000, low=2, high=1_000_000, help="virtual examples, the classes in turn: 20000 for CIFAR-100"
    )
    virtual_batch: int = option(32, low=2, help="virtual examples in a step")

    def check(self, problem: ProblemSpec) -> None:
        if not problem.task.feature_shape:
            raise UsageError("algorithm.name=vhl: the model needs a split point, features(x) and a module called head")
        if self.virtual < self.virtual_batch:
            raise UsageError(
                f"algorithm.virtual={self.virtual}: is less than algorithm.virtual_batch={self.virtual_batch}"
            )

    def init(self, ctx: Context) -> State:
        x, y = virtual_data(ctx.task.inputs.shape, ctx.task.num_classes, self.virtual)
        return super().init(ctx) | {"virtual": {"x": x.to(ctx.task.device), "y": y.to(ctx.task.device)}}

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return (SendVirtualData(),)

    def start(self, ctx: Context, client: State, down: State) -> State:
        order = torch.randperm(self.virtual).to(ctx.task.device)
        return super().start(ctx, client, down) | {"virtual": client["virtual"], "order": order}

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        place = torch.arange(self.virtual_batch, device=loss.device) + ctx.step * self.virtual_batch
        rows = work["order"][place % self.virtual]
        x, y = (work["virtual"][name][rows] for name in ("x", "y"))
        virtual = ctx.task.forward(weights, x)  # its buffers are dropped: only x moves running statistics
        loss = loss + self.alpha * ctx.task.loss(virtual.logits, y)
        if not self.align:
            return loss, output
        own, other = (F.normalize(part.features.flatten(1)) for part in (output, virtual))
        together = contrast(torch.cat([own, other.detach()]), torch.cat([batch.y, y]), self.temperature)
        return loss + self.align * (together + 0.1 * contrast(other, y, self.temperature)), output


class SendVirtualData(Exchange):
    """Setup: every client receives the virtual data and keeps it."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"virtual": server["virtual"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"virtual": down["virtual"]}, {}
