"""The base class of wrappers: algorithms that change some hooks of another algorithm, their `base`.

`algorithm.base` is configured like an algorithm: base=scaffold, or base={name: fedprox, mu: 0.01}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rayfed.algorithm import Algorithm, Delegate, Exchange, delegated
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option


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
    needs_split = derived(lambda self: self.base.needs_split)
    requires_hard_labels = derived(lambda self: self.base.requires_hard_labels)
    computes_with_inputs = derived(lambda self: self.base.computes_with_inputs)
    mixes_labels = derived(lambda self: self.base.mixes_labels)
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

    check = delegated(Algorithm.check, "base")
    modules = delegated(Algorithm.modules, "base")
    adapt = delegated(Algorithm.adapt, "base")
    notes = delegated(Algorithm.notes, "base")
    privacy_spent = delegated(Algorithm.privacy_spent, "base")
    init = delegated(Algorithm.init, "base")
    join = delegated(Algorithm.join, "base")
    global_model = delegated(Algorithm.global_model, "base")
    downloaded_model = delegated(Algorithm.downloaded_model, "base")
    trained_model = delegated(Algorithm.trained_model, "base")
    predict = delegated(Algorithm.predict, "base")


def wrapped_algorithms(algorithm: Algorithm) -> list[Algorithm]:
    """Return the algorithms that `algorithm` wraps, the outermost first; the list is empty if it is not a wrapper."""
    return [algorithm.base, *wrapped_algorithms(algorithm.base)] if isinstance(algorithm, Wrapper) else []


def innermost(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm inside all wrappers."""
    return [algorithm, *wrapped_algorithms(algorithm)][-1]
