"""ADCOL with private uploads, for an honest but curious server: Li, He and Song 2023, section on privacy, table 17.

    client:  sends z' + Lap(1/ε) on each coordinate, z' being z rescaled to [0, 1]; its divergence sees z'
    server:  ADCOL

The paper's text prints "Gau" and defines "Lap". With guarantee=strict, z' is then scaled to an L1 norm of 1/2, so that
ε holds for the vector as a whole.

In each round a client sends a share of its representations (`sampling`). It draws records without replacement across
rounds and starts again when all were sent once: to spend ε only once, as the paper does, `sampling` must be at most one
over the number of rounds.

The privacy spent, as recorded, is ε times the number of times that a record may have been sent. It protects a
`representation` that is replaced by any other (strict), or one `rescaled coordinate`, a number in [0, 1] that changes
while the others stay. The latter is how we read the paper's ε, and it is weak: if one of the d coordinates of z becomes
the smallest or the largest, rescaling moves all others, so that such a change, like one of the whole vector, costs up
to dε.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, Replies, State
from rayfed.algorithms.adcol import Adcol
from rayfed.algorithms.dp_adcol import RECORDS_NOTE, refuse_shared_predictor
from rayfed.core.options import option
from rayfed.privacy import SIMULATION_NOTE
from rayfed.privacy.laplace import laplace_like, to_half_l1_ball, to_unit_range


@dataclass(frozen=True, kw_only=True)
class LocalDPAdcol(Adcol):
    name: ClassVar[str] = "local_dp_adcol"
    reference: ClassVar[str] = "Li, He and Song 2023, differential privacy, table 17"

    epsilon: float = option(5.0, low=1e-6, help="ε of one upload of a record")
    guarantee: str = option(
        "coordinate",
        choices=("coordinate", "strict"),
        help="ε protects each coordinate of a rescaled vector, or the whole vector",
    )
    hidden: list[int] = option([512], low=1, high=65536, help="widths of the discriminator's hidden layers")

    @property
    def strict(self) -> bool:
        return self.guarantee == "strict"

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        refuse_shared_predictor(self)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        total = self.epsilon * math.prod(ctx.task.feature_shape)
        weaker = f"; {total:g} per vector, or per coordinate whose change moves the vector's range and all others"
        sizes = list(problem.examples.values())[: problem.task.num_clients]
        times = max(math.ceil(problem.rounds * self.upload_size(n) / n - 1e-9) for n in sizes)
        return (
            f"ε={self.epsilon:g} per " + ("vector" if self.strict else "rescaled coordinate" + weaker),
            f"an upload contains {self.sampling:g} of the records, and each pass over all of them spends ε again: a "
            f"record is sent up to {times} times in {problem.rounds} rounds, which spends {times * self.epsilon:g}",
            RECORDS_NOTE,
            SIMULATION_NOTE,
            *super().notes(ctx, problem),
        )

    def init(self, ctx: Context) -> State:
        # per client, how many times it went through its records so far
        passes = torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=ctx.task.device)
        return super().init(ctx) | {"passes": passes}

    def join(self, ctx: Context) -> State:
        order = torch.randperm(ctx.examples).to(ctx.task.device)
        return super().join(ctx) | {"order": order, "position": torch.tensor(0, device=order.device)}

    def discriminator_input(self, z: Tensor) -> Tensor:
        return to_half_l1_ball(to_unit_range(z)) if self.strict else to_unit_range(z)

    def protect_upload(self, z: Tensor) -> Tensor:
        return z + laplace_like(z, 1 / self.epsilon)

    def select_records(self, ctx: Context, client: State, examples: int) -> tuple[State, Tensor | None]:
        order, position, count = client["order"], int(client["position"]), self.upload_size(examples)
        rows = order[position : position + count]
        if position + count >= examples:
            order, position = torch.randperm(examples).to(rows.device), -len(rows)
            rows = torch.cat([rows, order[: count - len(rows)]])
        return client | {"order": order, "position": torch.tensor(position + count, device=rows.device)}, rows

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        passes = server["passes"].clone()
        for reply in replies.each:
            passes[reply.client] += len(reply.up["representations"]) / reply.examples
        return super().aggregate(ctx, server, replies) | {"passes": passes}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        times = math.ceil(float(server["passes"].max()) - 1e-9)
        return Privacy(times * self.epsilon, "representation" if self.strict else "rescaled coordinate")
