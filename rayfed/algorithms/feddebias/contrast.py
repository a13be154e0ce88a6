"""FedDebias's contrast L_con of pseudo-data and local data (Eq. 5 and 6), and the max step on its projector."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.core.network import gradients
from rayfed.core.task import Batch
from rayfed.core.trees import Weights


def paired_rows(examples: int, pseudo_examples: int, device: torch.device) -> Tensor:
    """Return for each of `examples` local examples the row of the pseudo-example that it is compared with."""
    return torch.arange(examples, device=device) % pseudo_examples


@dataclass(frozen=True)
class Contrast:
    """L_con, of features or of their projections.

    Attributes:
        tau1, tau2: Temperatures of the positive and the negative pairs.
        tau_mode: "multiply" or "divide": what a temperature does to a similarity.
        projects: Whether features pass through the projector, `task.modules["projector"]`.
    """

    tau1: float
    tau2: float
    tau_mode: str
    projects: bool

    def loss(
        self,
        ctx: Context,
        theta: Weights,
        pseudo: Tensor,
        received: Tensor,
        local: Tensor,
        overlap: Tensor | None = None,
    ) -> Tensor:
        """Return L_con, a scalar.

        Args:
            theta: The projector's weights; ignored without a projector.
            pseudo: φ(x_p) [|D_p|, ...].
            received: φ_g(x_p) [|D_p|, ...].
            local: φ(x) [batch, ...].
            overlap: ⟨ỹ_p, y⟩ of each pair [batch], with which mixtures are corrected (Eq. 6).
        """
        rows = paired_rows(len(local), len(pseudo), local.device)
        vectors = [features.flatten(1) for features in (pseudo[rows], received[rows], local)]
        if overlap is not None:
            vectors.append(vectors[0] - overlap[:, None] * vectors[2])
        if self.projects:
            vectors = [ctx.task.modules["projector"](theta, vector)[0] for vector in vectors]
        positive = F.cosine_similarity(vectors[0], vectors[1])
        negative = F.cosine_similarity(vectors[0 if overlap is None else 3], vectors[2])
        if self.tau_mode == "divide":
            return F.softplus(negative / self.tau2 - positive / self.tau1).mean()
        return F.softplus(self.tau2 * negative - self.tau1 * positive).mean()

    def ascend(self, ctx: Context, work: State, batch: Batch) -> None:
        """Take the max step θ ← θ + η ∇L_con, on `work["projector"]` in place."""
        with torch.no_grad():
            pseudo, local = (ctx.task.forward(work["weights"], x).features for x in (work["pseudo"], batch.x))

        def negated(theta: Weights) -> tuple[Tensor, Weights]:
            return -self.loss(ctx, theta, pseudo, work["received_features"], local, work.get("overlap")), {}

        grads, _, _ = gradients(negated, work["projector"])
        ctx.optimizer.update_(work["projector"], grads, work["projector_optimizer"])
