"""Any method with a channel around the exchanges of its rounds."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayfed.algorithm import Algorithm, Context, Exchange, Privacy, ProblemSpec, State, Traits
from rayfed.algorithms.common.wrapper import SectionWrapper
from rayfed.channel.channel import Channel
from rayfed.channel.checks import check_channel_on
from rayfed.channel.exchange import ChannelExchange, own


@dataclass(frozen=True, kw_only=True)
class Channelled(SectionWrapper):
    """`base` with `channel`; the exchanges before the first round and after the last pass as they are."""

    channel: Channel = field(default=Channel())

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        traits = super().traits
        return replace(traits, depends_on_rounds=traits.depends_on_rounds or self.channel.depends_on_rounds)

    def wrapped(self, exchange: Exchange) -> Exchange:
        return ChannelExchange(exchange, self.channel)

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return self.base.setup_exchanges

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return self.base.final_exchanges

    def check(self, problem: ProblemSpec) -> None:
        self.base.check(problem)
        check_channel_on(self.channel, problem)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return self.base.privacy_spent(ctx, server) if self.channel.privacy is None else self.channel.spent(ctx)

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return the bytes by the formula of the method's own class, which has them without compression."""
        if self.channel.compression:
            return None
        return super().bytes_formula(ctx, examples)

    def global_model(self, ctx: Context, server: State) -> Any:
        return self.base.global_model(ctx, own(server))

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return self.base.downloaded_model(ctx, own(client), own(down))

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return self.base.trained_model(ctx, work, own(client), own(down))


def channel_of(algorithm: Algorithm) -> Channel | None:
    """Return the channel that a configuration has put around a method; None without one."""
    return algorithm.channel if type(algorithm) is Channelled else None
