"""Algorithms whose hooks are intercepted, and the check that hooks do not modify their inputs."""

from typing import Any

from helpers.comparison import facts
from rayfed.algorithm import Algorithm, Exchange

HOOKS = (
    *("check", "modules", "adapt", "init", "broadcast", "unicast", "weight", "weights", "aggregate", "join", "phases"),
    *("start", "prepare", "step", "finish", "global_model", "downloaded_model", "trained_model", "predict"),
)


class Impure(AssertionError):
    """A hook modified one of its inputs."""


STAGES = ("setup_exchanges", "round_exchanges", "final_exchanges")


def intercepted(algorithm: Algorithm, around: Any) -> Algorithm:
    """Return a copy of `algorithm` whose hooks, and those of its exchanges, are called as
    around(name, hook, self, *args).

    Hooks that are called by another hook are called directly.
    """
    running = []

    def wrapped(kind: type, name: str) -> Any:
        original = getattr(kind, name)

        def hook(self: Exchange, *args: Any, **kwargs: Any) -> Any:
            if running:
                return original(self, *args, **kwargs)
            running.append(name)
            try:
                return around(name, original, self, *args, **kwargs)
            finally:
                running.pop()

        return hook

    def copy_of(exchange: Exchange) -> Exchange:
        kind = type(exchange)
        members = {name: wrapped(kind, name) for name in HOOKS if hasattr(kind, name)}
        for name in ("server_side_weighting", "prepares_batches"):  # not derived from the hooks overridden here
            members[name] = getattr(exchange, name)
        if isinstance(exchange, Algorithm):
            members |= {name: exchanges(getattr(kind, name)) for name in STAGES}
            members["adaptation"] = property(lambda self: of(self, kind.adaptation.fget(self)))
        copied = object.__new__(type("Intercepted", (kind,), members))
        vars(copied).update(vars(exchange))
        return copied

    def of(owner: Algorithm, exchange: Exchange) -> Exchange:
        return exchange if exchange is owner or type(exchange).__name__ == "Intercepted" else copy_of(exchange)

    def exchanges(original: Any) -> property:
        return property(lambda self: tuple(of(self, exchange) for exchange in original.fget(self)))

    return copy_of(algorithm)


def pure(name: str, hook: Any, self: Exchange, *args: Any, **kwargs: Any) -> Any:
    lent = [arg for k, arg in enumerate(args) if not (name in ("step", "finish") and k == 1)]  # `work` is its own
    before = facts([self, *lent, kwargs])
    result = hook(self, *args, **kwargs)
    after = facts([self, *lent, kwargs])
    changed = [k for k, (was, now) in enumerate(zip(before, after, strict=True)) if was != now]
    if changed:
        raise Impure(
            f"{name} changed {['the algorithm' if k == 0 else f'argument {k} of those lent' for k in changed]}"
        )
    return result
