"""Algorithms whose hooks are intercepted, and the check that hooks do not modify their inputs."""

from typing import Any

from helpers.comparison import facts
from rayfed.algorithm import Algorithm

HOOKS = (
    *("check", "modules", "adapt", "init", "broadcast", "unicast", "weight", "weights", "aggregate", "join", "phases"),
    *("start", "prepare", "step", "finish", "global_model", "downloaded_model", "trained_model", "predict"),
)


class Impure(AssertionError):
    """A hook modified one of its inputs."""


def intercepted(algorithm: Algorithm, around: Any) -> Algorithm:
    """Return a copy of `algorithm` whose hooks are called as around(name, hook, self, *args)."""

    def wrap(name: str) -> Any:
        original = getattr(type(algorithm), name)
        return lambda self, *args, **kwargs: around(name, original, self, *args, **kwargs)

    kind = type("Intercepted", (type(algorithm),), {name: wrap(name) for name in HOOKS})
    copied = object.__new__(kind)
    vars(copied).update(vars(algorithm))
    return copied


def pure(name: str, hook: Any, self: Algorithm, *args: Any, **kwargs: Any) -> Any:
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
