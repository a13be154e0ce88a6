"""ADCOL with sampled parties: the server keeps what each party sent last, and D learns from all of it."""

from dataclasses import dataclass

from torch import Tensor

from rayfed.algorithm import Context, ProblemSpec, Replies, State
from rayfed.algorithms.common.discriminator_server import DiscriminatorServer
from rayfed.core.errors import UsageError
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class RepresentationCache(DiscriminatorServer):
    cache: bool = option(False, help="the discriminator also learns from the last vectors of parties not asked now")

    def check(self, problem: ProblemSpec) -> None:
        super().check(problem)
        if self.fixed_size and self.cache:
            raise UsageError(
                "algorithm.cache=true: with fixed_size=true an output stands for another party in each round, so old "
                "vectors have none"
            )

    def init(self, ctx: Context) -> State:
        return super().init(ctx) | ({"cache": {}} if self.cache else {})

    def known(self, ctx: Context, server: State, replies: Replies) -> tuple[dict[int, Tensor], State]:
        sent, kept = super().known(ctx, server, replies)
        if not self.cache:
            return sent, kept
        old = {int(party): z for party, z in server["cache"].items()}
        known = dict(sorted((old | sent).items()))
        return known, kept | {"cache": {str(party): z for party, z in known.items()}}
