"""How FedDebias's pseudo-data D_p comes to the clients: whose means it is made of, who makes them, when they travel.

For each mean of clients' images the server draws the client that makes it. In the setup all clients send theirs; then
they get D_p and keep it (`once`), or D_p goes down with each model, and with their models the round's clients send the
means of the next D_p (`each_round`). Means of a proxy data set are made by the server.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayfed.algorithm import ClientData, Context, Exchange, ProblemSpec, Replies, State
from rayfed.algorithms.common.proxy_data import check_proxy, proxy_means
from rayfed.algorithms.common.pseudo_data import draw_owners, sample_means
from rayfed.algorithms.common.soft_labels import check_real_inputs
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.trees import only


@dataclass(frozen=True, kw_only=True)
class PseudoDataExchange(FedAvg):
    pseudo: str = option("rsm", choices=("rsm", "mixture"), help="means of clients' images, or of a proxy data set")
    proxy: str = option("photographs", help="mixture: photographs (scikit-learn's two), noise, or a name for data.name")
    pseudo_samples: int | None = option(None, low=1, high=65536, help="|D_p|; null: the batch size")
    rsm_images: int = option(10, low=1, high=10_000, help="images in a mean")
    transfer: str = option("each_round", choices=("each_round", "once"), help="how often clients get pseudo-data")

    @property
    def used(self) -> bool:
        """Whether there is any pseudo-data."""
        return True

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        if not self.used:
            return ()
        collect = (CollectMeans(self),) if self.pseudo == "rsm" else ()
        return (*collect, SendPseudoData()) if self.transfer == "once" else collect

    def check(self, problem: ProblemSpec) -> None:
        check_real_inputs(problem, self.name)
        if self.pseudo == "mixture":
            check_proxy(self.proxy, problem.task.inputs)

    def init(self, ctx: Context) -> State:
        none = {"pseudo": torch.zeros(0, device=ctx.task.device)} if self.setup_exchanges else {}
        return super().init(ctx) | none | self.from_proxy(ctx)

    def from_proxy(self, ctx: Context) -> State:
        """New pseudo-data of the proxy's, where that is what it is made of."""
        if self.pseudo != "mixture" or not self.used:
            return {}
        count = self.pseudo_samples or ctx.batch_size
        return {"pseudo": proxy_means(self.proxy, ctx.task.inputs, count, self.rsm_images).to(ctx.task.device)}

    def owners(self, ctx: Context) -> State:
        """Return the clients that are to send the means of the next pseudo-data, drawn anew."""
        if self.pseudo != "rsm":
            return {}
        return {"owners": draw_owners(ctx.cohort, self.pseudo_samples or ctx.batch_size)}

    def means(self, ctx: Context, down: State, data: ClientData) -> State:
        """Return the means that this client is asked for."""
        if "owners" not in down or not (count := int((down["owners"] == ctx.client).sum())):
            return {}
        return {"means": sample_means(data.train, count, self.rsm_images)}

    def broadcast(self, ctx: Context, server: State) -> State:
        down = only(server, self.averaged)
        if self.used and self.transfer == "each_round":
            down |= self.owners(ctx) | {"pseudo": server["pseudo"]}
        return down

    def start(self, ctx: Context, client: State, down: State) -> State:
        received = down if "pseudo" in down else client
        return super().start(ctx, client, down) | (only(received, ("pseudo",)) if self.used else {})

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        kept, up = super().finish(ctx, work, client, down, data)
        return kept, up | self.means(ctx, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        fresh = pooled(ctx, replies)
        if self.transfer == "each_round":
            fresh |= self.from_proxy(ctx)
        return server | only(replies.mean, self.averaged) | fresh


def pooled(ctx: Context, replies: Replies) -> State:
    """Return new pseudo-data from the means that clients sent, if any did."""
    means = [reply.up["means"] for reply in replies.each if "means" in reply.up]
    return {"pseudo": torch.cat(means).to(ctx.task.device)} if means else {}


@dataclass(frozen=True)
class CollectMeans(Exchange):
    """Setup: the clients send the means that make the first pseudo-data."""

    method: PseudoDataExchange

    def broadcast(self, ctx: Context, server: State) -> State:
        return self.method.owners(ctx)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client, self.method.means(ctx, down, data)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return server | pooled(ctx, replies)


class SendPseudoData(Exchange):
    """Setup with `transfer=once`: every client receives the pseudo-data and keeps them."""

    def broadcast(self, ctx: Context, server: State) -> State:
        return {"pseudo": server["pseudo"]}

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return client | {"pseudo": down["pseudo"]}, {}
