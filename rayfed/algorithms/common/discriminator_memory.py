"""ADCOL with several discriminators: a party keeps those of the last rounds and takes the mean of their divergences."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.algorithm import ClientData, Context, ProblemSpec, State
from rayfed.algorithms.common.discriminator import divergence
from rayfed.algorithms.common.representation_cache import RepresentationCache
from rayfed.core.errors import UsageError
from rayfed.core.network import weights_of
from rayfed.core.options import option
from rayfed.core.trees import Weights, tree_map


@dataclass(frozen=True, kw_only=True)
class DiscriminatorMemory(RepresentationCache):
    discriminators: int = option(
        1, low=1, high=1000, help="N_d, how many of the last discriminators the divergence is a mean of"
    )

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if self.fixed_size and self.discriminators > 1:
            raise UsageError(
                f"algorithm.discriminators={self.discriminators}: with fixed_size=true there is one, new in each round"
            )

    def join(self, ctx: Context) -> State:
        older = self.discriminators - 1
        if not older:
            return super().join(ctx)
        template = weights_of(ctx.task.modules["discriminator"].module)
        stacked = tree_map(lambda leaf: torch.zeros(older, *leaf.shape, dtype=leaf.dtype, device=leaf.device), template)
        rounds = torch.zeros(older, device=ctx.task.device)  # in which they were received
        return super().join(ctx) | {"older": stacked, "rounds": rounds}

    def start(self, ctx: Context, client: State, down: State) -> State:
        work = super().start(ctx, client, down)
        if "older" in client:
            # that of round 1 was never trained: it counts in that round alone, for want of another
            used = (client["rounds"] > max(ctx.round - self.discriminators, 1)).float()
            work |= {"older": client["older"], "used": used}
        return work

    def divergences(self, ctx: Context, work: State, down: State, z: Tensor) -> Tensor:
        """The mean divergence over the discriminators at hand; they are frozen, so in evaluation mode."""

        def of(weights: Weights) -> Tensor:
            return divergence(ctx.task.modules["discriminator"](weights, z, train=False)[0])

        newest = of(down["discriminator"])
        if "older" not in work:
            return newest
        older = [
            work["used"][k] * of(tree_map(lambda leaf, k=k: leaf[k], work["older"])) for k in range(len(work["used"]))
        ]
        return (newest + torch.stack(older).sum()) / (1 + work["used"].sum())

    def keep(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().keep(ctx, work, client, down, data)
        if "older" in client:
            push = {name: torch.cat([new[None], client["older"][name]]) for name, new in down["discriminator"].items()}
            times = torch.cat([torch.full_like(client["rounds"][:1], ctx.round), client["rounds"]])
            kept |= {"older": {name: value[:-1] for name, value in push.items()}, "rounds": times[:-1]}
        return kept, up
