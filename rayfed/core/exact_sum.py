"""Weighted sums of nested tensors that do not depend on the order of their terms.

Hosts add up what their clients send, and floating-point addition is not associative: two hosts and four hosts would
round differently and end with different models. Here every term is first rounded to a multiple of 2⁻⁴⁰ in float64. Sums
of such numbers are exact below 2¹², so their order does not matter. The rounding costs less than 10⁻¹² per term, a
ten-thousandth of the rounding of a float32 weight of size 0.1. Larger sums are correct to float64 but may depend on the
order. Infinities and NaN pass through. A block of clients is added in few operations, whatever its width.
"""

import functools
import operator
from collections.abc import Container, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.core.trees import as_real, is_counter, tree_map

_GRID = 2.0**-40
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_AT_ONCE = 2**24
"""Numbers that are rounded together on a GPU: their copies take 128 MiB, and smaller groups take more launches."""
_IN_CACHE = 2**14  # the same on a CPU, where its cache has room for other things, too

Path = tuple[str, ...]


class ExactSum:
    """Σ weight·tree over trees of the same structure; integer leaves, which are counters, become their maximum.

    Args:
        untrained: The names of leaves that are not summed where all trees have the same bits, such as masks.

    Attributes:
        equal: The untrained leaves by their path; None where trees differ. Like `dtypes`, known once `value` was read.
    """

    def __init__(
        self,
        value: Any = None,
        dtypes: Any = None,
        untrained: Container[str] = (),
        equal: dict[Path, Tensor | None] | None = None,
    ):
        self._value = value
        self.dtypes = dtypes
        self._untrained = untrained
        self.equal = equal or {}
        self._only: tuple[Any, float] | None = None  # the single term, which is smaller than its float64 sum

    @property
    def is_empty(self) -> bool:
        """Whether nothing was added."""
        return self._value is None and self._only is None

    @property
    def value(self) -> Any:
        """The sum in float64, before it is rounded to the dtypes of the trees; None where nothing was added."""
        if self._only is not None:
            tree, weight = self._only
            self._only = None
            self._add([tree], [weight])
        return self._value

    def add(self, tree: Any, weight: float) -> None:
        """Add `weight` times `tree`, which must not be modified afterwards."""
        self.add_all([tree], [weight])

    def add_all(self, trees: Sequence[Any], weights: Sequence[float]) -> None:
        """Add Σ weights[i]·trees[i], in few operations if the tensors of the trees are slices of stacked tensors."""
        if self.value is None and len(trees) == 1:
            self._only = trees[0], weights[0]
        elif trees:
            self._add(trees, weights)

    def _add(self, trees: Sequence[Any], weights: Sequence[float]) -> None:
        if self._value is None:
            self._value = tree_map(_zero, trees[0])
            self.dtypes = tree_map(lambda leaf: leaf.dtype, trees[0])
            self.equal = {}
            if self._untrained:
                self.equal = dict(_leaves(trees[0], self._untrained))
        for tree in trees:
            if any(leaf is not None for leaf in self.equal.values()):
                self._compare(dict(_leaves(tree, self._untrained)))
        alone = len(trees) == 1
        pairs: list[tuple[Tensor, Tensor]] = []

        def collect(total: Tensor, *of_trees: Tensor) -> None:
            terms = of_trees[0]
            if not alone:
                terms = _stacked(of_trees)
            pairs.append((total, terms))

        tree_map(collect, self._value, *trees)
        on_gpu: list[tuple[Tensor, Tensor]] = []
        for total, leaf in pairs:
            if is_counter(total):
                if not alone:
                    leaf = leaf.amax(0)
                torch.maximum(total, leaf, out=total)
            elif total.device.type == "cpu":
                _add_in_cache(as_real(total), as_real(leaf), weights)
            else:
                on_gpu.append((as_real(total), as_real(leaf)))
        _add_in_groups(on_gpu, weights)

    def merge(self, other: "ExactSum") -> None:
        """Add another sum, which must not be used afterwards."""
        if self.value is None:
            self.__dict__.update(vars(other))
        elif other._only is not None:
            self.add(*other._only)
        elif other.value is not None:
            self._value = tree_map(_join, self._value, other.value)
            self._compare(other.equal)

    def equal_to(self, tree: Any) -> dict[Path, Tensor | None]:
        """Return `equal` without the leaves that differ from those of `tree`, where it has them."""
        names = {path[-1] for path in self.equal}
        known = dict(_leaves(tree, names))
        equal = dict(self.equal)
        for path, leaf in self.equal.items():
            if not _same_bits(leaf, known.get(path, leaf)):
                equal[path] = None
        return equal

    def _compare(self, leaves: dict[Path, Tensor | None]) -> None:
        equal = dict(self.equal)
        for path, leaf in self.equal.items():
            if not _same_bits(leaf, leaves[path]):
                equal[path] = None
        self.equal = equal

    def result(self) -> Any:
        """Return the sum in the dtypes of the trees that were added."""
        result = tree_map(lambda total, dtype: total.to(dtype), self.value, self.dtypes)
        for (*keys, name), leaf in self.equal.items():
            if leaf is not None:
                functools.reduce(operator.getitem, keys, result)[name] = leaf
        return result


def _leaves(tree: Any, names: Container[str], path: Path = ()) -> Iterator[tuple[Path, Tensor | None]]:
    """Yield the tensors of nested dicts whose own keys are in `names`, without counters."""
    if not isinstance(tree, dict):
        return
    for key, value in tree.items():
        if isinstance(value, Tensor) and key in names and not is_counter(value):
            yield (*path, key), value
        yield from _leaves(value, names, (*path, key))


def _same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return False
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_as_integers(a), _as_integers(b.to(a.device)))


def _as_integers(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    real = as_real(tensor)
    return real.view(_INTEGERS[real.element_size()])


def _zero(leaf: Tensor) -> Tensor:
    """Return the sum of no terms like `leaf`."""
    if leaf.is_complex():
        dtype = torch.complex128
    else:
        dtype = torch.float64
    if is_counter(leaf):
        return leaf.clone()
    return torch.zeros_like(leaf, dtype=dtype)


def _add_in_cache(total: Tensor, terms: Tensor, weights: Sequence[float]) -> None:
    """Add Σ weights[i]·terms[i] on a CPU in pieces for its cache, for which NumPy takes less time than torch.

    A piece is some rows of a single large term, or all of several small terms.
    """
    if terms.dtype not in (torch.float32, torch.float64):
        terms = terms.float()
    sums = np.atleast_1d(total.numpy())
    values = terms.numpy(force=True).reshape(len(weights), *sums.shape)
    factors = np.array(weights) / _GRID
    factors = factors.reshape(-1, *[1] * sums.ndim)
    size = max(1, sums.size)
    rows = max(1, _IN_CACHE * len(sums) // size)
    together = max(1, _IN_CACHE // size)
    with np.errstate(all="ignore"):  # of infinities and NaN
        for first in range(0, len(sums), rows):
            for i in range(0, len(weights), together):
                some = values[i : i + together, first : first + rows]
                piece = some.astype(np.float64)
                piece *= factors[i : i + together]
                np.rint(piece, out=piece)
                piece *= _GRID
                if len(piece) == 1:
                    sums[first : first + rows] += piece[0]
                else:
                    sums[first : first + rows] += piece.sum(0)


def _add_in_groups(pairs: Sequence[tuple[Tensor, Tensor]], weights: Sequence[float]) -> None:
    """Add Σ weights[i]·terms[i] to each total on a GPU, in few launches."""
    if not pairs:
        return
    factors = _factors(weights, pairs[0][0].device)
    for group in _groups(pairs):
        totals = [total for total, _ in group]
        terms = [leaf.to(torch.float64, copy=True) for _, leaf in group]
        if isinstance(factors, float):
            torch._foreach_mul_(terms, factors)
        else:
            torch._foreach_mul_(terms, [factors.view(-1, *[1] * total.dim()) for total in totals])
        torch._foreach_round_(terms)
        if len(weights) > 1:
            terms = [term.sum(0) for term in terms]
        torch._foreach_add_(totals, terms, alpha=_GRID)


def _factors(weights: Sequence[float], device: torch.device) -> float | Tensor:
    """Return the weights in units of the grid: a number, or a tensor on `device`, to which it is copied once."""
    if len(weights) == 1:
        return weights[0] / _GRID
    factors = torch.tensor(weights, dtype=torch.float64) / _GRID
    return factors.to(device, non_blocking=True)


def _groups(pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Cut totals and their terms [...] or [n, ...] by rows into groups of about `_AT_ONCE` numbers."""
    group = list[tuple[Tensor, Tensor]]()
    size = 0
    for total, terms in pairs:
        pieces = [(total, terms)]
        if total.dim() and terms.numel() > _AT_ONCE:
            rows = max(1, _AT_ONCE * len(total) // terms.numel())
            parts = terms.split(rows, terms.dim() - total.dim())
            pieces = list(zip(total.split(rows), parts, strict=True))
        for piece in pieces:
            group.append(piece)
            size += piece[1].numel()
            if size >= _AT_ONCE:
                yield group
                group = []
                size = 0
    if group:
        yield group


def _stacked(leaves: Sequence[Tensor]) -> Tensor:
    """Return `leaves` stacked along a new leading dimension, as a view where they are slices of a stacked tensor."""
    first = leaves[0]
    step = int(leaves[1].storage_offset()) - int(first.storage_offset())
    at_start = _place(first, 0)
    if step < 0 or any(_place(leaf, i * step) != at_start for i, leaf in enumerate(leaves)):
        return torch.stack(list(leaves))
    shape = (len(leaves), *first.shape)
    return first.as_strided(shape, (step, *first.stride()))


def _place(leaf: Tensor, shift: int) -> tuple[Any, ...]:
    """Return all that says where a tensor would lie in memory if it began `shift` numbers earlier.

    A storage is known by its object, because the storage of a tensor subclass may have no address.
    """
    offset = leaf.storage_offset() - shift
    return leaf.untyped_storage()._cdata, offset, leaf.dtype, leaf.shape, leaf.stride()


def _join(total: Tensor, term: Tensor) -> Tensor:
    if is_counter(total):
        return torch.maximum(total, term)
    return total.add_(term.to(total.device))
