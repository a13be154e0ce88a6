"""Checks that hooks do not modify their inputs, by the counters that torch keeps of in-place changes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayfed.core.trees import named_tensors


class ImpureHook(RuntimeError):
    """A hook modified an input in place."""


@contextmanager
def untouched(hook: str, **inputs: Any) -> Iterator[None]:
    """Raise `ImpureHook` if a tensor in one of `inputs` is modified in place within the block."""
    before = {name: [tensor._version for _, tensor in named_tensors(tree)] for name, tree in inputs.items()}
    yield
    for name, tree in inputs.items():
        if before[name] != [tensor._version for _, tensor in named_tensors(tree)]:
            raise ImpureHook(
                f"{hook} changed `{name}` in place; other clients and rounds share it, so a hook must return new "
                "state: write x = x + y, not x += y or x.add_(y), or clone first (only `work` may be changed in place)"
            )
