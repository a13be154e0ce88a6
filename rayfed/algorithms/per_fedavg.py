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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rayfed.algorithm import Context, Exchange, Phase, ProblemSpec, Retrained, State, Traits
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import add, only, sub

ADAPT = "adapt"
"""The name of the phase of adaptation."""


@dataclass(frozen=True, kw_only=True)
class PerFedAvg(FedAvg):
    """The model received is scored after adaptation for evaluate.adapt_epochs, or finetune_steps; the paper takes 1."""

    name: ClassVar[str] = "per_fedavg"
    reference: ClassVar[str] = "Fallah, Mokhtari and Ozdaglar 2020, Alg. 1"
    traits: ClassVar[Traits] = replace(FedAvg.traits, supports_loss_terms=False, default_eval_point="adapted")

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
        size = self.parts * problem.batch_size
        ragged = [client for client, n in problem.examples.items() if n < size or (not problem.drop_last and n % size)]
        if problem.vmap_clients > 1 and ragged:
            raise UsageError(
                f"placement.vmap_clients={problem.vmap_clients}: algorithm.name={self.name} takes {self.parts} batches "
                f"per step, and the last ones of client {ragged[0]} are shorter; use placement.vmap_clients=1, or a "
                "smaller local.batch_size with local.drop_last=true"
            )

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return (ctx.local._replace(batch_size=self.parts * ctx.batch_size),)

    @property
    def adaptation(self) -> Exchange:
        return Retrained(self, self.adaptation_phases)

    def adaptation_phases(self, ctx: Context) -> Sequence[Phase]:
        """Return that of the steps w ← w − α ∇f(w) on the client's data."""
        return (Phase(ADAPT, steps=self.finetune_steps) if self.finetune_steps else ctx.local._replace(name=ADAPT),)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        task, weights = ctx.task, work["weights"]
        alpha = ctx.optimizer.lr if self.alpha is None else ctx.scaled(self.alpha)
        first, second, *third = [batch] * 2 if ctx.phase == ADAPT else split(batch, self.parts)
        grads, loss, buffers = task.gradients(weights, first)
        ahead = weights | buffers | add(only(weights, grads), grads, alpha=-alpha)
        if ctx.phase == ADAPT:
            return work | {"weights": ahead}, {"loss": loss}
        grads, loss, buffers = task.gradients(ahead, second)
        for part in third:
            nearby_grads = [
                task.gradients(weights | add(only(weights, grads), grads, alpha=delta), part)[0]
                for delta in (self.delta, -self.delta)
            ]
            grads = add(grads, sub(*nearby_grads), alpha=-alpha / (2 * self.delta))
        optimizer = ctx.optimizer if self.beta is None else replace(ctx.optimizer, lr=ctx.scaled(self.beta))
        optimizer.update_(weights, grads, work["optimizer"])
        return work | {"weights": weights | buffers}, {"loss": loss}


def split(batch: Batch, parts: int) -> list[Batch]:
    """Return `parts` batches of equal size, in order; they share examples if the size of `batch` is not a multiple."""
    n = len(batch.y)
    size = -(-n // parts)
    return [
        Batch(batch.x[k : k + size], batch.y[k : k + size])
        for k in ((n - size) * i // (parts - 1) for i in range(parts))
    ]
