"""What every wrapper needs: all hooks go to `base`, an algorithm in its own right; a wrapper overrides what it changes.

`algorithm.base` is configured like an algorithm: base=scaffold, or base={name: fedprox, mu: 0.01}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rayfed.algorithm import Algorithm, ClientData, Context, Phase, Privacy, ProblemSpec, Replies, Reply, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Batch, Task


def derived(value: Callable[[Any], Any]) -> Any:
    """A class attribute of `Algorithm` that depends on the wrapper's fields: `value(self)`."""
    return property(value)


@dataclass(frozen=True, kw_only=True)
class Wrapper(Algorithm):
    base: Algorithm = option(FedAvg(), help="the wrapped algorithm: a name, or a group with its name and keys")

    averaged = derived(lambda self: self.base.averaged)
    server_side_weighting = derived(lambda self: self.base.server_side_weighting)
    prepares = derived(lambda self: self.base.prepares)
    supports_loss_terms = derived(lambda self: self.base.supports_loss_terms)
    requires_hard_labels = derived(lambda self: self.base.requires_hard_labels)
    sample_without_replacement = derived(lambda self: self.base.sample_without_replacement)
    trips = derived(lambda self: self.base.trips)
    setup_exchanges = derived(lambda self: self.base.setup_exchanges)
    final_exchanges = derived(lambda self: self.base.final_exchanges)
    refuses_unseen_clients = derived(lambda self: self.base.refuses_unseen_clients)
    default_eval_point = derived(lambda self: self.base.default_eval_point)
    logged_scalars = derived(lambda self: self.base.logged_scalars)

    def check(self, problem: ProblemSpec) -> None:
        self.base.check(problem)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return self.base.modules(task)

    def adapt(self, ctx: Context) -> Context:
        return self.base.adapt(ctx)

    def remarks(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        return self.base.remarks(ctx, problem)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return self.base.privacy_spent(ctx, server)

    def init(self, ctx: Context) -> State:
        return self.base.init(ctx)

    def broadcast(self, ctx: Context, server: State) -> State:
        return self.base.broadcast(ctx, server)

    def unicast(self, ctx: Context, server: State) -> State:
        return self.base.unicast(ctx, server)

    def weight(self, ctx: Context, examples: int) -> float:
        return self.base.weight(ctx, examples)

    def weights(self, ctx: Context, server: State, replies: Sequence[Reply]) -> Sequence[float]:
        return self.base.weights(ctx, server, replies)

    def aggregate(self, ctx: Context, server: State, replies: Replies) -> State:
        return self.base.aggregate(ctx, server, replies)

    def join(self, ctx: Context) -> State:
        return self.base.join(ctx)

    def phases(self, ctx: Context) -> Sequence[Phase]:
        return self.base.phases(ctx)

    def start(self, ctx: Context, client: State, down: State) -> State:
        return self.base.start(ctx, client, down)

    def prepare(self, ctx: Context, batch: Batch) -> Batch:
        return self.base.prepare(ctx, batch)

    def step(self, ctx: Context, work: State, down: State, batch: Batch) -> tuple[State, dict[str, Tensor]]:
        return self.base.step(ctx, work, down, batch)

    def finish(self, ctx: Context, work: State, client: State, down: State, data: ClientData) -> tuple[State, State]:
        return self.base.finish(ctx, work, client, down, data)

    def global_model(self, ctx: Context, server: State) -> Any:
        return self.base.global_model(ctx, server)

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return self.base.downloaded_model(ctx, client, down)

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return self.base.trained_model(ctx, work, client, down)

    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        return self.base.predict(ctx, model, x)


def inside(algorithm: Algorithm) -> list[Algorithm]:
    """What `algorithm` wraps, from the outside in; [] if it is no wrapper."""
    return [algorithm.base, *inside(algorithm.base)] if isinstance(algorithm, Wrapper) else []


def innermost(algorithm: Algorithm) -> Algorithm:
    """The algorithm inside all wrappers."""
    return [algorithm, *inside(algorithm)][-1]
