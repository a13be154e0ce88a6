"""The base class of wrappers: algorithms that change some hooks of another algorithm, their `base`.

`algorithm.base` is configured like an algorithm: base=scaffold, or base={name: fedprox, mu: 0.01}.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rayfed.algorithm import Algorithm, Context, Delegate, Exchange, Traits, delegated
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.options import option


@dataclass(frozen=True, kw_only=True)
class Wrapper(Delegate, Algorithm):
    """An algorithm with the hooks of `base`, except for those that a subclass overrides.

    A subclass that changes all exchanges of its base overrides `wrapped`. A subclass that overrides hooks changes the
    rounds of a base with one exchange. The wrapper's own hooks are those of `wrapped(base)`.
    """

    base: Algorithm = option(FedAvg(), help="wrapped algorithm: a name, or a mapping with its name and keys")

    @property
    def traits(self) -> Traits:  # type: ignore[override]
        """Those of the base. A subclass changes some of them by `replace(super().traits, …)`."""
        return self.base.traits

    @property
    def held_out_share(self) -> float:
        return self.base.held_out_share

    def wrapped(self, exchange: Exchange) -> Exchange:
        """Return the exchange to run in place of `exchange`, an exchange of the base."""
        if exchange is self.base:
            return self
        return exchange

    @property
    def target(self) -> Exchange:
        """The exchange that has the wrapper's hooks, except for those that the wrapper overrides."""
        exchange = self.wrapped(self.base)
        if exchange is self:
            return self.base
        return exchange

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
    privacy_of_record = delegated(Algorithm.privacy_of_record, "base")
    init = delegated(Algorithm.init, "base")
    join = delegated(Algorithm.join, "base")
    global_model = delegated(Algorithm.global_model, "base")
    downloaded_model = delegated(Algorithm.downloaded_model, "base")
    trained_model = delegated(Algorithm.trained_model, "base")
    predict = delegated(Algorithm.predict, "base")


def wrapped_algorithms(algorithm: Algorithm) -> list[Algorithm]:
    """Return the algorithms that `algorithm` wraps, the outermost first; the list is empty if it is not a wrapper."""
    wrapped = []
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.base
        wrapped.append(algorithm)
    return wrapped


def innermost(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm inside all wrappers."""
    while isinstance(algorithm, Wrapper):
        algorithm = algorithm.base
    return algorithm


@dataclass(frozen=True, kw_only=True)
class SectionWrapper(Wrapper):
    """A wrapper that a section of the configuration puts around a method, which keeps its name."""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.base.name

    @property
    def reference(self) -> str:  # type: ignore[override]
        return self.base.reference

    def bytes_formula(self, ctx: Context, examples: Sequence[int]) -> float | None:
        """Return the bytes by the formula of the method's own class."""
        formula = vars(type(self.base)).get("bytes_formula")
        if formula is None:
            return None
        count: float | None = formula(self.base, ctx, examples)
        return count
