"""The base class of wrappers: algorithms that change some hooks of another algorithm, their `base`.

`algorithm.base` is configured like an algorithm: base=scaffold, or base={name: fedprox, mu: 0.01}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rayfed.algorithm import Algorithm, Context, Delegate, Exchange, Privacy, ProblemSpec, State
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option
from rayfed.core.task import Task


def derived(value: Callable[[Any], Any]) -> Any:
    """Return a class attribute of `Algorithm` that depends on the wrapper's fields: `value(self)`."""
    return property(value)


@dataclass(frozen=True, kw_only=True)
class Wrapper(Delegate, Algorithm):
    """An algorithm with the hooks of `base`, except for those that a subclass overrides.

    A subclass that changes all exchanges of its base overrides `wrapped`. A subclass that overrides hooks changes the
    rounds of a base with one exchange. The wrapper's own hooks are those of `wrapped(base)`.
    """

    base: Algorithm = option(FedAvg(), help="wrapped algorithm: a name, or a mapping with its name and keys")

    supports_loss_terms = derived(lambda self: self.base.supports_loss_terms)
    requires_hard_labels = derived(lambda self: self.base.requires_hard_labels)
    requires_classes = derived(lambda self: self.base.requires_classes)
    sample_without_replacement = derived(lambda self: self.base.sample_without_replacement)
    assumes_uniform_sampling = derived(lambda self: self.base.assumes_uniform_sampling)
    refuses_unseen_clients = derived(lambda self: self.base.refuses_unseen_clients)
    default_eval_point = derived(lambda self: self.base.default_eval_point)
    logged_scalars = derived(lambda self: self.base.logged_scalars)
    keeps_optimizer = derived(lambda self: self.base.keeps_optimizer)
    trains_server = derived(lambda self: self.base.trains_server)
    depends_on_rounds = derived(lambda self: self.base.depends_on_rounds)
    held_out_share = derived(lambda self: self.base.held_out_share)

    def wrapped(self, exchange: Exchange) -> Exchange:
        """Return the exchange to run in place of `exchange`, an exchange of the base."""
        return self if exchange is self.base else exchange

    @property
    def target(self) -> Exchange:
        """The exchange whose hooks are those of the wrapper, except for the hooks that the wrapper overrides."""
        exchange = self.wrapped(self.base)
        return self.base if exchange is self else exchange

    @property
    def setup_exchanges(self) -> Sequence[Exchange]:
        return tuple(map(self.wrapped, self.base.setup_exchanges))

    @property
    def round_exchanges(self) -> Sequence[Exchange]:
        return tuple(map(self.wrapped, self.base.round_exchanges))

    @property
    def final_exchanges(self) -> Sequence[Exchange]:
        return tuple(map(self.wrapped, self.base.final_exchanges))

    @property
    def adaptation(self) -> Exchange:
        return self.wrapped(self.base.adaptation)

    def check(self, problem: ProblemSpec) -> None:
        self.base.check(problem)

    def modules(self, task: Task) -> dict[str, nn.Module]:
        return self.base.modules(task)

    def adapt(self, ctx: Context) -> Context:
        return self.base.adapt(ctx)

    def notes(self, ctx: Context, problem: ProblemSpec) -> Sequence[str]:
        return self.base.notes(ctx, problem)

    def privacy_spent(self, ctx: Context, server: State) -> Privacy | None:
        return self.base.privacy_spent(ctx, server)

    def init(self, ctx: Context) -> State:
        return self.base.init(ctx)

    def join(self, ctx: Context) -> State:
        return self.base.join(ctx)

    def global_model(self, ctx: Context, server: State) -> Any:
        return self.base.global_model(ctx, server)

    def downloaded_model(self, ctx: Context, client: State, down: State) -> Any:
        return self.base.downloaded_model(ctx, client, down)

    def trained_model(self, ctx: Context, work: State, client: State, down: State) -> Any:
        return self.base.trained_model(ctx, work, client, down)

    def predict(self, ctx: Context, model: Any, x: Tensor) -> Tensor:
        return self.base.predict(ctx, model, x)


def wrapped_algorithms(algorithm: Algorithm) -> list[Algorithm]:
    """Return the algorithms that `algorithm` wraps, the outermost first; the list is empty if it is not a wrapper."""
    return [algorithm.base, *wrapped_algorithms(algorithm.base)] if isinstance(algorithm, Wrapper) else []


def innermost(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm inside all wrappers."""
    return [algorithm, *wrapped_algorithms(algorithm)][-1]
