"""Arithmetic on trees: nested dicts, lists and tuples whose leaves are tensors. Nothing here changes its arguments."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`tree` with `fn` applied to every tensor (and its counterparts in `rest`); None and plain values stay."""
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    if isinstance(tree, dict):
        return {key: tree_map(fn, tree[key], *(other[key] for other in rest)) for key in tree}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(tree_map(fn, *leaves) for leaves in zip(tree, *rest, strict=True)))
    if isinstance(tree, (list, tuple)):
        return type(tree)(tree_map(fn, *leaves) for leaves in zip(tree, *rest, strict=True))
    return tree


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `tree` with its dotted path, in a fixed order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_tensors(value, f"{path}.{key}" if path else str(key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, f"{path}.{index}" if path else str(index))


def nbytes(tree: Any) -> int:
    """Bytes that the tensors of `tree` take on the wire."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in named_tensors(tree))


def zeros_like(tree: Any) -> Any:
    return tree_map(torch.zeros_like, tree)


def clone(tree: Any) -> Any:
    return tree_map(torch.clone, tree)


def detach(tree: Any) -> Any:
    return tree_map(Tensor.detach, tree)


def add(a: Any, b: Any, *, alpha: float = 1.0) -> Any:
    """a + alpha·b."""
    return tree_map(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def sub(a: Any, b: Any) -> Any:
    return tree_map(torch.sub, a, b)


def scale(tree: Any, factor: float | Tensor) -> Any:
    return tree_map(lambda x: x * factor, tree)


def stack(trees: list[Any]) -> Any:
    """One tree with a new leading dimension, the index in `trees`."""
    return tree_map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def unstack(tree: Any, count: int) -> list[Any]:
    """The inverse of `stack`; the parts are copies, so that none keeps the whole alive."""
    return [tree_map(lambda x, index=index: x[index].clone(), tree) for index in range(count)]


def only(weights: Weights, names: Any) -> Weights:
    """The entries of `weights` whose names are in `names`, in the order of `weights`."""
    return {name: value for name, value in weights.items() if name in names}


def without(weights: Weights, names: Any) -> Weights:
    """The entries of `weights` whose names are not in `names`."""
    return {name: value for name, value in weights.items() if name not in names}
