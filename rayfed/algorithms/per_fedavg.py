"""Per-FedAvg: Fallah, Mokhtari and Ozdaglar 2020, "Personalized Federated Learning with Theoretical Guarantees: A
Model-Agnostic Meta-Learning Approach", Alg. 1, with the first-order (FO) and Hessian-free (HF) steps of section 5.

    client:  split every batch into equal parts b, b' (and b'');  w' = w − α ∇f(w; b)
             FO:  w ← w − β ∇f(w'; b')
             HF:  w ← w − β (g − α (∇f(w + δg; b'') − ∇f(w − δg; b'')) / 2δ),  g = ∇f(w'; b')
    server:  FedAvg
    use:     a client first takes steps w ← w − α ∇f(w) on its data

A batch is two (HF: three) times as large as configured, so an epoch has ⌊n / 2B⌋ steps (HF: ⌊n / 3B⌋). If the size of a
short last batch is not a multiple of the number of parts, neighbouring parts share examples.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from rayfed.algorithm import Context, Exchange, Phase, ProblemSpec, Retrained, State, Stepped
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, add, only, sub

ADAPT = "adapt"
"""The name of the phase of adaptation."""


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """The model received is scored after adaptation for evaluate.adapt_epochs, or finetune_steps; the paper takes 1."""

    name = "per_fedavg"
    reference = "Fallah, Mokhtari and Ozdaglar 2020, Alg. 1"
    traits = replace(FedAvg.traits, supports_loss_terms=False, default_eval_point="adapted")

    alpha: float | None = option(None, above=0, help="α, step size of the adaptation; null: local.lr")
    beta: float | None = option(
        None,
        above=0,
        help="β, step size of the meta-model; null: local.lr",
        elsewhere={"PFLlib": "local.lr, whatever its option beta says"},
    )
    variant: str = option("fo", choices=("fo", "hf"), help="first-order or Hessian-free steps")
    delta: float = option(1e-3, above=0, help="hf: δ of the finite differences")
    finetune_steps: int | None = option(None, low=1, help="steps of adaptation; null: evaluate.adapt_epochs")

    @property
    def parts(self) -> int:
        """The number of batches of the configured size that one step takes."""
        return 2 if self.variant == "fo" else 3

    def check(self, problem: ProblemSpec) -> None:
        if problem.vmap_clients == 1:
            return
        size = self.parts * problem.batch_size
        for client, n in problem.examples.items():
            if n < size or (not problem.drop_last and n % size):
                raise UsageError(
                    f"placement.vmap_clients={problem.vmap_clients}: algorithm.name={self.name} takes {self.parts} "
                    f"batches per step, and the last ones of client {client} are shorter; use "
                    "placement.vmap_clients=1, or a smaller local.batch_size with local.drop_last=true"
                )

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (ctx.local._replace(batch_size=self.parts * ctx.batch_size),)

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, self.adaptation_phases)

    def adaptation_phases(self, ctx: Context) -> Sequence[Phase]:
        """Return that of the steps w ← w − α ∇f(w) on the client's data."""
        if self.finetune_steps:
            return (Phase(ADAPT, steps=self.finetune_steps),)
        return (ctx.local._replace(name=ADAPT),)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> Stepped:
        weights = work["weights"]
        if ctx.phase == ADAPT:
            ahead, loss = self.adapted(ctx, weights, batch)
            return work | {"weights": ahead}, {"loss": loss}
        first, second, *third = split(batch, self.parts)
        ahead, _ = self.adapted(ctx, weights, first)
        g, loss, buffers = ctx.task.gradients(ahead, second)
        for part in third:
            g = self.corrected(ctx, weights, g, part)
        optimizer = ctx.optimizer
        if self.beta is not None:
            optimizer = replace(optimizer, lr=ctx.scaled(self.beta))
        optimizer.update_(weights, g, work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}

    def step_size(self, ctx: Context) -> float:
        """Return α of the round."""
        return ctx.optimizer.lr if self.alpha is None else ctx.scaled(self.alpha)

    def adapted(self, ctx: Context, weights: Weights, batch: Batch) -> tuple[Weights, Tensor]:
        """Return w − α ∇f(w; batch), and the loss at w."""
        grads, loss, buffers = ctx.task.gradients(weights, batch)
        trained = only(weights, grads)
        moved = add(trained, grads, alpha=-self.step_size(ctx))
        return weights | buffers | moved, loss

    def corrected(self, ctx: Context, weights: Weights, g: Weights, batch: Batch) -> Weights:
        """Return g − α (∇f(w + δg) − ∇f(w − δg)) / 2δ for the loss f of the batch."""
        w = only(weights, g)
        above = weights | add(w, g, alpha=self.delta)
        below = weights | add(w, g, alpha=-self.delta)
        grads_above, _, _ = ctx.task.gradients(above, batch)
        grads_below, _, _ = ctx.task.gradients(below, batch)
        alpha = self.step_size(ctx)
        return add(g, sub(grads_above, grads_below), alpha=-alpha / (2 * self.delta))


def split(batch: Batch, parts: int) -> list[Batch]:
    """Return `parts` batches of equal size, in order; they share examples if the size of `batch` is not a multiple."""
    n = len(batch.y)
    size = math.ceil(n / parts)
    batches = []
    for i in range(parts):
        first = (n - size) * i // (parts - 1)
        rows = slice(first, first + size)
        batches.append(Batch(batch.x[rows], batch.y[rows]))
    return batches
