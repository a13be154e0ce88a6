"""ADCOL: Li, He and Song 2023, "Adversarial Collaborative Learning on Non-IID Features", Eq. 2 and Alg. 1.

Nothing is averaged: each party keeps its own model F_i = predictor ∘ G_i, batch norm included. What the parties share
is a discriminator D that guesses from a representation z = G_i(x) whose it is.

    client:  F_i ← F_i − η ∇[CE(F_i(x), y) + μ KL(1/N ‖ D(z))],  KL = −log N − (1/N) Σ_j log D_j(z);  D is frozen
             sends z of its training examples: after local training, in evaluation mode, and never augmented
    server:  D ← D − η_D ∇CE(D(z), i) in shuffled minibatches of all that was sent

`sampling` sends a fresh share of the vectors each round. If a round reaches some parties only, D keeps its N outputs
and the target stays 1/N; with `cache` it learns from the last vectors of the others, too, which the server keeps.

With `fixed_size` (appendix B.14) D has one output per party of the round, which makes two trips: the cohort trains
without D and sends z, the server trains a new D on their places in the cohort, and the same parties train again, with
the target one over the cohort's size. Five of fifty parties that drop out at random before five others are drawn, as in
table 18, make the same rounds as `cohort=5`: any five are as likely. D's momentum starts at zero in every round.

A discriminator needs steps: Digits give it 582 a round (37,190 vectors, batches of 64), few data need more passes
(`server_epochs`) for as many. While `discriminator_loss` stays at log N, every μ trains as μ = 0 does.

With `discriminators` = k the divergence is the mean over those received in the last k rounds, which were trained in
rounds max(1, t − k) to t − 1 (Eq. 18); the first, which is untrained, counts in round 1 alone. Parties keep the older
ones, so that one travels. `share_predictor` averages the head (appendix B).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, State, represent
from rayfed.algorithms.common.discriminator_memory import DiscriminatorMemory
from rayfed.core.errors import UsageError
from rayfed.core.network import gradients
from rayfed.core.options import option
from rayfed.core.task import Batch
from rayfed.core.trees import Weights, only


@dataclass(frozen=True, kw_only=True)
class Adcol(DiscriminatorMemory):
    """Sends representations, gets a discriminator, which is trained and never averaged; keeps and is scored with its
    own model. The target of sampled parties, initial discriminators and the server's optimiser are ours."""

    name: ClassVar[str] = "adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, Alg. 1"
    supports_loss_terms: ClassVar[bool] = False
    default_eval_point: ClassVar[str] = "downloaded"  # the party's own model

    mu: float = option(1.0, low=0, help="μ, weight of the divergence; 0 is the control: local training alone")
    sampling: float = option(1.0, above=0, high=1, help="share of its representations that a party sends each round")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if self.network == "mlp":
            return
        if self.linear:
            raise UsageError(
                f"algorithm.linear=true: algorithm.network={self.network} is not; use linear=false, or network=mlp"
            )
        if self.server_batch_size == 1:
            raise UsageError(
                f"algorithm.server_batch_size=1: algorithm.network={self.network} cannot train its batch norm on one "
                "representation; use 2 or more"
            )

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        sizes = list(problem.examples.values())[: problem.task.num_clients]
        vectors = sum(self.count(n) for n in sizes) * problem.cohort / len(sizes)
        steps = self.passes * math.ceil(vectors / self.server_batch_size)
        outputs = problem.cohort if self.fixed_size else problem.task.num_clients
        return (
            f"the discriminator takes about {steps} steps a round (582 on the paper's Digits); while its loss stays "
            f"at log {outputs} = {math.log(outputs):.2f} it knows nothing, and mu changes nothing: raise "
            "algorithm.server_epochs",
        )

    def prepared(self, z: Tensor) -> Tensor:
        """Representations [batch, width] as a discriminator is given them, by the server or in the client's loss."""
        return z

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        weights = work["weights"]

        def objective(trained: Weights) -> tuple[Tensor, tuple[Weights, dict[str, Tensor]]]:
            loss, output = self.loss(ctx, weights | trained, work, down, batch)
            z = output.features.flatten(1)
            metrics = {"cross_entropy": loss, "representation_variance": z.var(0, unbiased=False).mean()}
            if "discriminator" in down:
                kl = self.divergences(ctx, work, down, self.prepared(z))
                loss, metrics = loss + self.mu * kl, metrics | {"divergence": kl}
            return loss, (output.buffers, metrics)

        grads, loss, (buffers, metrics) = gradients(objective, only(weights, self.trained(ctx)))
        ctx.optimizer.update_(weights, self.correct(ctx, grads, work, down), work["optimizer"])
        return work | {"weights": weights | buffers}, metrics | {"loss": loss}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = self.keep(ctx, work, client, down, data)
        more, rows = self.chosen(ctx, client, len(data.train))
        z = represent(ctx, work["weights"], data.train, rows).flatten(1)
        return kept | more, up | {"representations": self.protected(self.prepared(z))}

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """4 · n · d · r + N · S_D: a share r of n representations of d numbers up, and N times the discriminator down.

        Variants that send more or in other trips (`fixed_size`, `share_predictor`) have no formula.
        """
        if self.fixed_size or self.share_predictor:
            return None
        representations = 4.0 * sum(examples) * math.prod(ctx.task.feature_shape) * self.sampling
        discriminator = sum(p.numel() for p in ctx.task.modules["discriminator"].module.parameters())
        return representations + len(examples) * 4 * discriminator

    def count(self, examples: int) -> int:
        """How many representations a party sends."""
        return math.ceil(self.sampling * examples - 1e-9)  # 0.28·25 is a little more than 7 in floating point

    def chosen(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        """(changes of the client's state, the rows whose representations it sends; None: all of them)."""
        return {}, None if self.sampling == 1 else torch.randperm(examples)[: self.count(examples)]

    def protected(self, z: Tensor) -> Tensor:
        """Representations as they are sent."""
        return z
