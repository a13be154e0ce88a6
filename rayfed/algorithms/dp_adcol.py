"""ADCOL with differential privacy: Li, He and Song 2023, section on privacy and appendix, tables 16 and 17.

`trusted` server: representations arrive as they are; what the server sends is protected. It trains the discriminator
by DP-SGD (per-example clipping to C, noise σC, Poisson batches), σ being the least for which all steps of all rounds
together keep to (ε, δ) by Rényi accounting. The first round fixes the sampling rate q = batch/n and ⌈1/q⌉ steps a pass.

`curious` server: a party sends a share of its representations in each round, every vector stretched to [0, 1] and with
Laplace noise of scale 1/ε on each coordinate (the text prints "Gau" and defines "Lap"). The local divergence sees the
same normalisation without noise. `strict` then scales a vector to an L1 norm of 1/2, which makes ε hold for it as a
whole. Parties draw without replacement across rounds, and start anew when all was sent once: to spend ε once, as the
paper does, `sampling` must be at most one over the number of rounds.

Privacy spent, as recorded: (trusted) ε at δ of the steps so far, for a `representation` that is in the pool of every
round or not; (curious) ε times the number of times that a record may have been sent, for a `representation` that
becomes any other (strict), or for one `stretched coordinate`, a number in [0, 1] that changes while the others stay.
That is how we read the paper's ε, and it is little: of d coordinates before the stretching, one that becomes the least
or the greatest moves all others, so that it, like the vector as a whole, is worth up to dε.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.common.private_discriminator import PrivateDiscriminator
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.privacy.laplace import laplace_like, to_half_l1_ball, to_unit_range
from rayfed.privacy.notes import SIMULATION_NOTE, large_delta_note

OF_TRUSTED = ("clip", "delta")  # options that mean nothing to a curious server


@dataclass(frozen=True, kw_only=True)
class DPAdcol(PrivateDiscriminator):
    """As ADCOL, with a private discriminator (trusted server) or noisy representations (curious server). A party keeps,
    beside its model, the order in which its records are drawn. C, σ and the batch are ours."""

    name: ClassVar[str] = "dp_adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, differential privacy, tables 16 and 17"

    guarantee: str = option(
        "coordinate",
        choices=("coordinate", "strict"),
        help="curious: ε for each coordinate of a stretched vector, or for the vector",
    )
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if self.guarantee == "strict" and not self.curious:
            raise UsageError(
                "algorithm.guarantee=strict: says what a curious server gets to see; use setting=curious, or "
                "guarantee=coordinate"
            )
        for field in dataclasses.fields(self) if self.curious else ():
            value = getattr(self, field.name)
            if field.name in OF_TRUSTED and value != field.default:
                raise UsageError(
                    f"algorithm.{field.name}={value:g}: is of a trusted server's DP-SGD, and algorithm.setting=curious "
                    "has none; leave it out, or use setting=trusted"
                )

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        width = math.prod(ctx.task.feature_shape)
        limits = (
            "a representation depends on other records through the network: no record-level privacy of training data",
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )
        if not self.curious:
            said = f"ε={self.epsilon:g} at δ={self.delta:g} protects what the server sends; uploads are bare"
            return (said, *large_delta_note(self.delta, sum(self.sent(problem)), "representations"), *limits)
        whole = f"{width * self.epsilon:g} for a vector, or for a coordinate that moves its range and so all others"
        of_what = "vector" if self.guarantee == "strict" else f"stretched coordinate: {whole}"
        sizes = list(problem.examples.values())[: problem.task.num_clients]
        times = max(math.ceil(problem.rounds * self.count(n) / n - 1e-9) for n in sizes)
        return (
            f"ε={self.epsilon:g} a {of_what}",
            f"an upload takes {self.sampling:g} of the records; each pass over them all spends ε once more: a record "
            f"is sent up to {times} times in {problem.rounds} rounds, which spends {times * self.epsilon:g}",
            *limits,
        )

    def init(self, ctx: Context) -> State:
        passes = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | ({"passes": passes} if self.curious else {})

    def join(self, ctx: Context) -> State:
        if not self.curious:
            return super().join(ctx)
        return super().join(ctx) | {"order": torch.randperm(ctx.examples), "place": torch.tensor(0)}

    def prepared(self, z: Tensor) -> Tensor:
        if not self.curious:
            return z
        return to_half_l1_ball(to_unit_range(z)) if self.guarantee == "strict" else to_unit_range(z)

    def protected(self, z: Tensor) -> Tensor:
        return z + laplace_like(z, 1 / self.epsilon) if self.curious else z

    def chosen(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        if not self.curious:
            return super().chosen(ctx, client, examples)
        order, place, count = client["order"], int(client["place"]), self.count(examples)
        rows = order[place : place + count]
        if place + count >= examples:
            order, place = torch.randperm(examples), -len(rows)
            rows = torch.cat([rows, order[: count - len(rows)]])
        return {"order": order, "place": torch.tensor(place + count)}, rows

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        server = super().aggregate(ctx, server, replies)
        if not self.curious:
            return server
        passes = server["passes"].clone()
        for reply in replies.each:
            passes[reply.client] += len(reply.up.get("representations", ())) / reply.examples
        return server | {"passes": passes}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        if not self.curious:
            return super().privacy_spent(ctx, server)
        times = math.ceil(float(server["passes"].max()) - 1e-9)
        unit = "representation" if self.guarantee == "strict" else "stretched coordinate"
        return Privacy(times * self.epsilon, unit)
