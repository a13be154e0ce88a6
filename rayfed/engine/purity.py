"""Watches that hooks change nothing that they were only lent: torch counts in-place changes anyway."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rayfed.core.trees import named_tensors


class ImpureHook(RuntimeError):
    """A hook changed in place what it had to leave alone."""


@contextmanager
def untouched(hook: str, **lent: Any) -> Iterator[None]:
    """Raises `ImpureHook` if a tensor in `lent` is changed in place within the block."""
    before = {name: [tensor._version for _, tensor in named_tensors(tree)] for name, tree in lent.items()}
    yield
    for name, tree in lent.items():
        if before[name] != [tensor._version for _, tensor in named_tensors(tree)]:
            raise ImpureHook(
                f"{hook} changed `{name}` in place; other clients and rounds share it, so a hook returns new state: "
                f"write x = x + y, not x += y or x.add_(y), or clone first (only `work` may be changed in place)"
            )
