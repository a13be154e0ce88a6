"""ADCOL with differential privacy: Li, He and Song 2023, section on privacy and appendix, tables 16 and 17.

`trusted` server: representations arrive as they are; what the server sends is protected. It trains the discriminator
by DP-SGD (per-example clipping to C, noise σC, Poisson batches), σ being the least for which all steps of all rounds
together keep to (ε, δ) by Rényi accounting. The first round fixes the sampling rate q = batch/n and ⌈1/q⌉ steps a pass.

`curious` server: a party sends a share of its representations in each round, every vector stretched to [0, 1] and with
Laplace noise of scale 1/ε on each coordinate (the text prints "Gau" and defines "Lap"). The local divergence sees the
same normalisation without noise. `strict` scales a vector to an L1 norm of 1/2 instead, which makes ε hold for it as a
whole. Parties draw without replacement across rounds, and start anew when all was sent once.

Privacy spent, as recorded: (trusted) ε at δ of the steps so far; (curious) ε of a whole vector times the number of
times that a record may have been sent: for `coordinate`, the width times the ε of a coordinate, the tables' budget.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rayfed.algorithm import Context, Replies, Setting, State
from rayfed.algorithms.adcol import Adcol
from rayfed.errors import UsageError
from rayfed.options import option
from rayfed.privacy.gaussian import noise_multiplier, spent, train_privately
from rayfed.privacy.laplace import half_ball, laplace_like, unit_range
from rayfed.tree import Weights


@dataclass(frozen=True, kw_only=True)
class DPAdcol(Adcol):
    """As ADCOL, with a private discriminator (trusted server) or noisy representations (curious server). A party keeps,
    beside its model, the order in which its records are drawn. C, σ and the batch are ours."""

    name: ClassVar[str] = "dp_adcol"
    source: ClassVar[str] = "Li, He and Song 2023, differential privacy, tables 16 and 17"

    setting: str = option("trusted", choices=("trusted", "curious"), help="the server: trusted, or honest but curious")
    epsilon: float = option(5.0, above=0, help="ε: of all rounds (trusted), of an upload (curious)")
    delta: float = option(0.01, above=0, high=0.01, help="δ of the trusted setting")
    clip: float = option(1.0, above=0, help="C, bound of a representation's gradient (trusted)")
    guarantee: str = option(
        "coordinate", choices=("coordinate", "strict"), help="curious: ε for each coordinate, or for the vector"
    )
    hidden: list[int] = option([512], low=1, help="widths of the discriminator's hidden layers")

    @property
    def curious(self) -> bool:
        return self.setting == "curious"

    def check(self, setting: Setting) -> None:
        super().check(setting)
        if self.share_predictor:
            raise UsageError("algorithm.share_predictor=true: sends weights that dp_adcol does not protect")
        if self.network != "mlp" and not self.curious:
            raise UsageError(
                f"algorithm.network={self.network}: batch norm mixes examples, so DP-SGD takes network=mlp"
            )

    def remarks(self, ctx: Context) -> Sequence[str]:
        width = math.prod(ctx.task.feature_shape)
        limit = (
            "a representation depends on other records through the network: no record-level privacy of training data"
        )
        if not self.curious:
            return (f"ε={self.epsilon:g} at δ={self.delta:g} protects what the server sends; uploads are bare", limit)
        whole = self.epsilon if self.guarantee == "strict" else width * self.epsilon
        return (
            f"ε={self.epsilon:g} a {'vector' if self.guarantee == 'strict' else 'coordinate'}: {whole:g} for a vector",
            f"an upload takes {self.sampling:g} of the records; each pass over them all spends ε once more",
            limit,
        )

    def init(self, ctx: Context) -> State:
        server, device = super().init(ctx), ctx.task.device
        if self.curious:
            return server | {"passes": torch.zeros(ctx.task.num_clients, dtype=torch.float64, device=device)}
        names = ("sigma", "rate", "steps")
        return server | {"private": {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}}

    def join(self, ctx: Context) -> State:
        if not self.curious:
            return super().join(ctx)
        return super().join(ctx) | {"order": torch.randperm(ctx.examples), "place": torch.tensor(0)}

    def prepared(self, z: Tensor) -> Tensor:
        if not self.curious:
            return z
        return half_ball(unit_range(z)) if self.guarantee == "strict" else unit_range(z)

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

    def taught(self, ctx: Context, server: State, weights: Weights, z: Tensor, places: Tensor) -> State:
        if self.curious:
            return super().taught(ctx, server, weights, z, places)
        old = {name: float(value) for name, value in server["private"].items()}
        rate = old["rate"] or min(1.0, self.server_batch_size / len(z))
        steps = self.passes * math.ceil(1 / rate - 1e-9)
        sigma = old["sigma"] or noise_multiplier(self.epsilon, self.delta, rate=rate, steps=steps * ctx.rounds)
        outputs = len(ctx.cohort) if self.fixed_size else ctx.task.num_clients
        module = self.discriminator(ctx.task, outputs).to(ctx.task.device)
        how: dict[str, Any] = {"rate": rate, "steps": steps, "sigma": sigma, "clip": self.clip}
        trained = train_privately(module, weights, z, places, optimizer=self.server_optimizer, **how)
        new = {"sigma": sigma, "rate": rate, "steps": old["steps"] + steps}
        private = {name: torch.full_like(server["private"][name], value) for name, value in new.items()}
        return {"discriminator": trained, "private": private}

    def privacy_spent(self, ctx: Context, server: State) -> float | None:
        if self.curious:
            width = 1 if self.guarantee == "strict" else math.prod(ctx.task.feature_shape)
            return width * self.epsilon * math.ceil(float(server["passes"].max()) - 1e-9)
        known = {name: float(value) for name, value in server["private"].items()}
        return spent(known["sigma"], self.delta, rate=known["rate"], steps=round(known["steps"]))
