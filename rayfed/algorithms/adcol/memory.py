"""Several discriminators (Eq. 18): a client keeps the earlier ones and averages the divergences over all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rayfed.algorithm import Context, State
from rayfed.algorithms.adcol.discriminator import divergence
from rayfed.core.network import weights_of
from rayfed.core.trees import Weights, tree_map


@dataclass(frozen=True)
class DiscriminatorMemory:
    """The discriminators of the last `size` rounds, the one just received included.

    The client's state holds the earlier ones, newest first: `earlier_discriminators`, weights [size − 1, ...], and
    `received_in`, the round [size − 1] of each, 0 where there is none yet. With `size` 1 nothing is kept.
    """

    size: int

    def join(self, ctx: Context) -> State:
        """Return the additions to a client's initial state."""
        earlier, device = self.size - 1, ctx.task.device
        if not earlier:
            return {}
        template = weights_of(ctx.task.modules["discriminator"].module)
        return {
            "earlier_discriminators": tree_map(
                lambda leaf: torch.zeros(earlier, *leaf.shape, dtype=leaf.dtype, device=leaf.device), template
            ),
            "received_in": torch.zeros(earlier, device=device),
        }

    def start(self, ctx: Context, client: State) -> State:
        """Return the additions to `work`: the earlier discriminators, and 1 for each that is recent enough, else 0."""
        if self.size == 1:
            return {}
        # The discriminator of round 1 was never trained: it counts in that round only, for want of another
        in_use = (client["received_in"] > max(ctx.round - self.size, 1)).float()
        return {"earlier_discriminators": client["earlier_discriminators"], "in_use": in_use}

    def divergence(self, ctx: Context, work: State, newest: Weights, z: Tensor) -> Tensor:
        """Return the mean divergence at `z` [batch, width]. Discriminators are frozen and run in evaluation mode."""

        def single(weights: Weights) -> Tensor:
            return divergence(ctx.task.modules["discriminator"](weights, z, train=False)[0])

        total = single(newest)
        if self.size == 1:
            return total
        in_use = work["in_use"]
        earlier = [
            in_use[k] * single(tree_map(lambda leaf, k=k: leaf[k], work["earlier_discriminators"]))
            for k in range(len(in_use))
        ]
        return (total + torch.stack(earlier).sum()) / (1 + in_use.sum())

    def finish(self, ctx: Context, client: State, down: State) -> State:
        """Return the changes of the client's state: the newest discriminator is added, the oldest dropped."""
        if self.size == 1:
            return {}
        earlier, rounds = client["earlier_discriminators"], client["received_in"]
        newest_first = {name: torch.cat([new[None], earlier[name]]) for name, new in down["discriminator"].items()}
        rounds = torch.cat([torch.full_like(rounds[:1], ctx.round), rounds])
        return {
            "earlier_discriminators": {name: value[:-1] for name, value in newest_first.items()},
            "received_in": rounds[:-1],
        }
