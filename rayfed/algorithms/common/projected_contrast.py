"""FedDebias's contrast L_con of pseudo-data and local data, and the projector θ that is trained against the model."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rayfed.algorithm import ClientData, Context, ProblemSpec, State
from rayfed.algorithms.common.mlp import mlp
from rayfed.algorithms.common.projected import with_projection
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch, Task
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class ProjectedContrast(FedAvg):
    mu: float = option(0.5, low=0, help="μ, weight of the contrast; 0: component 1 alone, without a projector")
    tau1: float = option(2.0, low=0, help="τ1, of local and global features of pseudo-data")
    tau2: float = option(2.0, low=0, help="τ2, of pseudo-data and local data")
    tau_mode: str = option("multiply", choices=("multiply", "divide"), help="what τ does to a similarity")
    max_step: bool = option(True, help="train the projector against the model; false: it stays as it was drawn")
    projector: bool = option(True, help="false: compare the features themselves, without a max step")
    widths: list[int] = option(
        [256, 256, 128], low=1, high=65536, help="widths of the projector's layers, the output last"
    )
    projector_in_extractor: bool = option(False, help="an MLP of `widths` ends the extractor; no max step (Fig. 5a)")

    def __post_init__(self) -> None:
        if not self.widths and (self.projects or self.projector_in_extractor):
            raise UsageError(
                "algorithm.widths=[]: a projector has one layer at least; algorithm.projector=false goes without one"
            )

    @property
    def projects(self) -> bool:
        return bool(self.mu) and self.projector and not self.projector_in_extractor

    @property
    def ascends(self) -> bool:
        """Whether there is a max step."""
        return self.projects and self.max_step

    def check(self, problem: ProblemSpec) -> None:
        for key in ("tau1", "tau2"):
            if self.tau_mode == "divide" and not getattr(self, key):
                raise UsageError(f"algorithm.{key}=0: cannot be divided by; use algorithm.tau_mode=multiply")
        if self.projects and not problem.task.feature_shape:
            raise UsageError(
                f"algorithm.name={self.name}: the model needs a split point, features(x) and a module called head"
            )
        super().check(problem)

    def adapt(self, ctx: Context) -> Context:
        return ctx.at(task=with_projection(ctx.task, self.widths)) if self.projector_in_extractor else ctx

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return {"projector": mlp([math.prod(task.feature_shape), *self.widths])} if self.projects else {}

    def init(self, ctx: Context) -> State:
        drawn = {"projector": ctx.task.modules["projector"].draw_weights()} if self.projects else {}
        return super().init(ctx) | drawn

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if not self.projects or not work:
            return work
        work |= {"projector": down["projector"]}
        fresh = ctx.optimizer.init(down["projector"])
        return work | {"ascent": client.get("ascent", fresh)} if self.ascends else work

    def contrast(
        self,
        ctx: Context,
        theta: Weights,
        local: Tensor,
        received: Tensor,
        own: Tensor,
        overlap: Tensor | None = None,
    ) -> Tensor:
        """L_con of features: φ(x_p) and φ_g(x_p), both [|D_p|, ...], and φ(x) [batch, ...]; with ⟨ỹ_p, y⟩, Eq. 6."""
        pairs = torch.arange(len(own), device=own.device) % len(local)
        parts = [part.flatten(1) for part in (local[pairs], received[pairs], own)]
        if overlap is not None:
            parts.append(parts[0] - overlap[:, None] * parts[2])
        if self.projects:
            parts = [ctx.task.modules["projector"](theta, part)[0] for part in parts]
        positive = F.cosine_similarity(parts[0], parts[1])
        negative = F.cosine_similarity(parts[0 if overlap is None else 3], parts[2])
        if self.tau_mode == "divide":
            return F.softplus(negative / self.tau2 - positive / self.tau1).mean()
        return F.softplus(self.tau2 * negative - self.tau1 * positive).mean()

    def ascend(self, ctx: Context, work: State, batch: Batch) -> None:
        """The max step, on `work["projector"]` in place."""
        with torch.no_grad():
            local, own = (ctx.task.forward(work["weights"], x).features for x in (work["pseudo"], batch.x))

        def negated(theta: Weights) -> tuple[Tensor, Weights]:
            return -self.contrast(ctx, theta, local, work["received"], own, work.get("overlap")), {}

        grads, _, _ = gradients(negated, work["projector"])
        ctx.optimizer.update_(work["projector"], grads, work["ascent"])

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        if not self.ascends:
            return kept, up
        moments = only(work, ("ascent",)) if self.keep_optimizer else {}
        return kept | moments, up | only(work, ("projector",))
