"""MOON: Li, He and Song 2021, "Model-Contrastive Federated Learning", Alg. 1, Eq. 3 and 4.

    client:  min over w of  f_i(w) + μ · mean −log( e^{s(z, z_glob)/τ} / (e^{s(z, z_glob)/τ} + e^{s(z, z_prev)/τ}) )
             s: cosine similarity; z, z_glob, z_prev: features of w, of the model received, and of the client's model
             after its last local training. z_glob and z_prev are constants, computed in evaluation mode.
    server:  as in FedAvg

Until a client has trained, its previous model is the initial one, as in PFLlib; in round 1 the term therefore has no
gradient.

As in the authors' code, a projection head comes after the features. It is an MLP, as wide as the features and then 256,
and its outputs are z. A new linear classifier follows. Guo, Tang and Lin 2022 (FedDebias) use widths [256, 128]. Zhang
et al. 2023 (DBE) and PFLlib have no such head, widths [], and z are the features of the model itself.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import ClientData, Context, Finished, State
from rayfed.algorithms.common.networks import with_projection
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Output
from rayfed.core.trees import Weights


def contrast(z: Tensor, z_glob: Tensor, z_prev: Tensor, tau: float) -> Tensor:
    """Return the mean of the model-contrastive term over the batch; the arguments are features [batch, ...]."""
    z = z.flatten(1)
    positive = F.cosine_similarity(z, z_glob.flatten(1)) / tau
    negative = F.cosine_similarity(z, z_prev.flatten(1)) / tau
    terms = torch.logaddexp(positive, negative) - positive
    return terms.mean()


@dataclass(frozen=True, kw_only=True)
class Moon(FedAvg):
    name = "moon"
    reference = "Li, He and Song 2021, Alg. 1, Eq. 3 and 4"
    traits = replace(FedAvg.traits, needs_split=True)

    mu: float = option(
        1.0,
        low=0,
        help="μ, weight of the model-contrastive term; 0 is FedAvg",
        elsewhere={"authors": "1 (5 in their example for CIFAR-10)", "PFLlib": "0"},
    )
    tau: float = option(
        0.5, above=0, help="τ, temperature of the cosine similarities", elsewhere={"authors": "0.5", "PFLlib": "1"}
    )
    widths: list[int] | None = option(
        None,
        low=1,
        high=65536,
        help="widths of the projection head; null: as features, then 256; []: no head",
        elsewhere={"authors": "that of the features, then 256", "PFLlib": "[]"},
    )

    bytes_formula = FedAvg.bytes_formula

    def adapt(self, ctx: Context) -> Context:
        if self.widths == []:
            return ctx
        return ctx.at(task=with_projection(ctx.task, self.widths))

    def join(self, ctx: Context) -> State:
        client = super().join(ctx)
        client["previous"] = ctx.task.initial_weights()
        return client

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        # the received model consists of `down` and the weights that the client keeps, which only `start` can read
        work["kept"] = client["weights"]
        work["previous"] = client["previous"]
        return work

    def loss(self, ctx: Context, weights: Weights, work: State, down: State, batch: Batch) -> tuple[Tensor, Output]:
        loss, output = super().loss(ctx, weights, work, down, batch)
        received = down["weights"] | work["kept"]
        z_glob = ctx.task.represent(received, batch.x)
        z_prev = ctx.task.represent(work["previous"], batch.x)
        contrastive = contrast(output.features, z_glob, z_prev, self.tau)
        return loss + self.mu * contrastive, output

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> Finished:
        kept, up = super().finish(ctx, work, client, down, data)
        kept["previous"] = work["weights"]
        return kept, up
