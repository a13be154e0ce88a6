"""ADCOL's discriminator under differential privacy, for a trusted server: it is trained by DP-SGD, on account."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import Context, Privacy, ProblemSpec, State
from rayfed.algorithms.adcol import Adcol
from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.core.trees import Weights
from rayfed.privacy.gaussian import check_budget, epsilon_spent, noise_multiplier, train_privately


@dataclass(frozen=True, kw_only=True)
class PrivateDiscriminator(Adcol):
    setting: str = option("trusted", choices=("trusted", "curious"), help="the server: trusted, or honest but curious")
    epsilon: float = option(5.0, low=1e-6, help="ε: of all rounds (trusted), of an upload (curious)")
    delta: float = option(0.01, above=0, high=0.01, help="δ of the trusted setting")
    clip: float = option(1.0, above=0, help="C, bound of a representation's gradient (trusted)")

    @property
    def curious(self) -> bool:
        return self.setting == "curious"

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if self.share_predictor:
            raise UsageError("algorithm.share_predictor=true: sends weights that dp_adcol does not protect")
        if self.network != "mlp" and not self.curious:
            raise UsageError(
                f"algorithm.network={self.network}: batch norm mixes examples, so DP-SGD takes network=mlp"
            )
        if not self.curious:
            fewest = sum(sorted(self.sent(problem))[: problem.cohort])
            if self.server_batch_size > fewest:
                raise UsageError(
                    f"algorithm.server_batch_size={self.server_batch_size}: the parties of a round may send no more "
                    f"than {fewest} representations, of which DP-SGD draws a batch; use at most {fewest}"
                )
            check_budget(self.epsilon, self.delta, self.steps(self.server_batch_size / fewest) * problem.rounds)

    def sent(self, problem: ProblemSpec) -> Sequence[int]:
        """How many representations each party sends in a round."""
        return [self.count(n) for n in list(problem.examples.values())[: problem.task.num_clients]]

    def steps(self, rate: float) -> int:
        """Steps of the discriminator in a round."""
        return self.passes * math.ceil(1 / rate - 1e-9)

    def init(self, ctx: Context) -> State:
        server = super().init(ctx)
        if self.curious:
            return server
        names, device = ("sigma", "rate", "steps"), ctx.task.device
        return server | {"private": {name: torch.zeros((), dtype=torch.float64, device=device) for name in names}}

    def taught(self, ctx: Context, server: State, weights: Weights, z: Tensor, places: Tensor) -> State:
        if self.curious:
            return super().taught(ctx, server, weights, z, places)
        old = {name: float(value) for name, value in server["private"].items()}
        rate = old["rate"] or min(1.0, self.server_batch_size / len(z))
        steps = self.steps(rate)
        sigma = old["sigma"] or noise_multiplier(self.epsilon, self.delta, rate=rate, steps=steps * ctx.rounds)
        outputs = len(ctx.cohort) if self.fixed_size else ctx.task.num_clients
        module = self.discriminator(ctx.task, outputs).to(ctx.task.device)
        how: dict[str, Any] = {"rate": rate, "steps": steps, "sigma": sigma, "clip": self.clip}
        trained = train_privately(module, weights, z, places, optimizer=self.server_optimizer, **how)
        new = {"sigma": sigma, "rate": rate, "steps": old["steps"] + steps}
        private = {name: torch.full_like(server["private"][name], value) for name, value in new.items()}
        return {"discriminator": trained, "private": private}

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        known = {name: float(value) for name, value in server["private"].items()}
        epsilon = epsilon_spent(known["sigma"], self.delta, rate=known["rate"], steps=round(known["steps"]))
        return Privacy(epsilon, "representation")
