"""The update of a client: what its averaged fields change of what it has received, as one vector over all fields.

The update of a tensor is up − down if the client received a tensor of that name, shape and type in a field of that
name, as the weights of FedAvg. Otherwise the tensor is its own update, as the changes that SCAFFOLD sends. Buffers of
the network, such as the running statistics of batch norm, are never changes. Their update is relative to a buffer of
that name in any field. Integers count, and have no update.

Values stay as values: a stage that leaves a number of an update as it is keeps the bits of what the client sent.
"""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rayfed.algorithm import State
from rayfed.core.exact_sum import ExactSum
from rayfed.core.trees import as_real, is_counter, named_tensors, tree_map

_ROUNDING = 1e-12
"""The difference by which shares that sum to 1 may miss it."""
_COLUMNS = 2**16
"""The coordinates of all clients that are looked at together: 52 MB for 100 clients in float64."""


def received(sent: State, down: State, buffers: Container[str]) -> State:
    """Return what the update of each tensor of `sent` is relative to, in the form of `sent`; zeros without anything.

    Args:
        sent: The averaged fields of a client.
        down: The fields that it received.
        buffers: The names of the network's buffers.
    """

    def counterpart(value: Any, other: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            if isinstance(other, Mapping):
                below = other
            else:
                below = {}
            return {key: counterpart(value[key], below.get(key), key) for key in value}
        if isinstance(value, (list, tuple)):
            if isinstance(other, (list, tuple)) and len(other) == len(value):
                others = other
            else:
                others = [None] * len(value)
            return type(value)(counterpart(one, two, "") for one, two in zip(value, others, strict=True))
        if not isinstance(value, Tensor):
            return value
        if name in buffers:
            candidates = [other, *_buffers_called(name, down)]
        else:
            candidates = [other]
        alike = []
        for tensor in candidates:
            if _is_alike(tensor, value):
                alike.append(tensor)
        if alike:
            return alike[0]
        return value.new_zeros(()).expand(value.shape)

    return {name: counterpart(value, down.get(name), name) for name, value in sent.items()}


def _buffers_called(name: str, down: State) -> Iterator[Any]:
    for field in down.values():
        if isinstance(field, Mapping) and name in field:
            yield field[name]


def _is_alike(tensor: Any, value: Tensor) -> bool:
    return isinstance(tensor, Tensor) and tensor.shape == value.shape and tensor.dtype == value.dtype


def flat_update(sent: State, base: State) -> tuple[Tensor, list[int]]:
    """Return the update as a vector, and the numbers of entries of its tensors, in order."""
    parts = []
    for value, start in _pairs(sent, base):
        parts.append(_difference(value, start))
    if parts:
        vector = torch.cat(parts)
    else:
        vector = torch.zeros(0)
    return vector, [part.numel() for part in parts]


def moved(sent: State, base: State, before: Tensor, after: Tensor) -> State:
    """Return `sent` with the update `after` in place of `before`; numbers whose update is the same keep their bits."""
    sizes = [as_real(value).numel() for value, _ in _pairs(sent, base)]
    parts = zip(before.split(sizes), after.split(sizes), strict=True)

    def move(value: Tensor, start: Tensor) -> Tensor:
        if is_counter(value):
            return value
        real = as_real(value)
        old, new = next(parts)
        numbers = as_real(start) + new.view(real.shape).to(real.dtype)
        return _like(torch.where((new == old).view(real.shape), real, numbers), value)

    return tree_map(move, sent, base)  # type: ignore[no-any-return]


def changes(sent: State, base: State, buffers: Container[str]) -> State:
    """Return the changes of trained tensors in place of their values; buffers and integers stay values."""
    return _by_name(lambda value, start: value - start, sent, base, buffers)


def values_of(changed: State, base: State, buffers: Container[str]) -> State:
    """Return the values that `changes` would give these changes, relative to another `base`."""
    return _by_name(lambda change, start: start + change, changed, base, buffers)


def _by_name(change: Callable[[Tensor, Tensor], Tensor], sent: State, base: State, buffers: Container[str]) -> State:
    def walk(value: Any, start: Any, name: str) -> Any:
        if isinstance(value, Mapping):
            return {key: walk(value[key], start[key], key) for key in value}
        if isinstance(value, (list, tuple)):
            return type(value)(walk(one, two, "") for one, two in zip(value, start, strict=True))
        stays = not isinstance(value, Tensor) or is_counter(value) or name in buffers
        if stays:
            return value
        return change(value, start)

    return {name: walk(value, base[name], name) for name, value in sent.items()}


def clipped(sent: State, base: State, bound: float | Tensor, order: int) -> State:
    """Return `sent` with its update scaled down to an L1 (`order` 1) or L2 norm of at most `bound`."""
    factor = (bound / norm(sent, base, order)).clamp(max=1)

    def clip(value: Tensor, start: Tensor) -> Tensor:
        if is_counter(value):
            return value
        return start + factor * (value - start)

    return tree_map(clip, sent, base)  # type: ignore[no-any-return]


def norm(sent: State, base: State, order: int = 2) -> Tensor:
    """Return the norm of an update in float64: float32 would lose a tenth of the L1 norm of 37 million numbers."""
    vector, _ = flat_update(sent, base)
    length: Tensor = torch.linalg.vector_norm(vector, order, dtype=torch.float64)
    return length


class Updates:
    """The updates of a cohort, as an attacker or a robust rule on the server sees them.

    They are never copied as a whole: what needs all clients looks at a block of coordinates at a time. A block lies
    within a tensor.

    Args:
        values: The averaged fields of each client.
        base: What the updates are relative to.
        weights: The weight of each client in the mean.
        buffers: The names of the network's buffers; see `ExactSum`.

    Attributes:
        shares: `weights`, normalised, float64 [clients].
        mass: The sum of `weights`, by which the update of a rule is multiplied. It is 1 where all replies are fresh.
    """

    def __init__(self, values: Sequence[State], base: State, weights: Sequence[float], buffers: Container[str] = ()):
        self.values = list(values)
        self.base = base
        self._weights = list(weights)
        self._buffers = buffers
        given = torch.tensor(self._weights, dtype=torch.float64)
        self.mass = float(given.sum())
        if self.mass:
            self.shares = given / self.mass
        else:
            self.shares = torch.full_like(given, 1 / len(given))

    def __len__(self) -> int:
        return len(self.values)

    def of(self, clients: Sequence[int]) -> "Updates":
        """Return the updates of the clients at these places."""
        chosen = [self.values[i] for i in clients]
        return Updates(chosen, self.base, [self._weights[i] for i in clients], self._buffers)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the updates, a block of coordinates at a time, real [clients, numbers]."""
        trees = [named_tensors(value) for value in self.values]
        for (_, start), *values in zip(named_tensors(self.base), *trees, strict=True):
            if not is_counter(start):
                yield from _blocks_of([value for _, value in values], start)

    def mean(self) -> State:
        """Return the weighted mean, with the bits that the engine's sum has."""
        return self._sum(self._weights)

    def combined(self, coefficients: Tensor) -> State:
        """Return base + mass · Σ_i c_i u_i in the form of what clients send, with c the `coefficients` [clients]."""
        return self._sum((self.mass * coefficients.double()).tolist())

    def each(self, combine: Callable[[Tensor], Tensor]) -> State:
        """Return base + mass · u, where `combine` returns u [numbers] for a block of the updates [clients, numbers].

        Blocks come in the order of `blocks`. Of integers it is the maximum.
        """

        def of_tensor(start: Tensor, *values: Tensor) -> Tensor:
            if is_counter(start):
                return torch.stack(values).amax(0)
            real = as_real(start)
            parts = [combine(block) for block in _blocks_of(values, start)]
            update = torch.cat(parts).to(real.dtype)
            return _like(real + self.mass * update.view(real.shape), start)

        return tree_map(of_tensor, self.base, *self.values)  # type: ignore[no-any-return]

    def products(self, *further: Sequence[Tensor]) -> Tensor:
        """Return the inner products of the updates and of `further` vectors, float64 [vectors, vectors].

        A further vector is given by its part for every block, [numbers].
        """
        size = len(self) + len(further)
        total = torch.zeros(size, size, dtype=torch.float64)
        for rows in self.columns(*further):
            total += (rows @ rows.T).cpu()
        return total

    def columns(self, *further: Sequence[Tensor]) -> Iterator[Tensor]:
        """Yield the updates and the `further` vectors, a few coordinates at a time, float64 [vectors, numbers]."""
        for number, updates in enumerate(self.blocks()):
            others = [vector[number].to(updates)[None] for vector in further]
            yield torch.cat([updates, *others]).double()

    def _sum(self, factors: Sequence[float]) -> State:
        total = ExactSum(untrained=self._buffers)
        for value, factor in zip(self.values, factors, strict=True):
            if factor:
                total.add(value, factor)
        rest = 1 - math.fsum(factors)
        if abs(rest) > _ROUNDING:
            total.add(self.base, rest)
        return total.result()  # type: ignore[no-any-return]


def distances(products: Tensor) -> Tensor:
    """Return the squared distances between vectors [n, n], given their inner products."""
    squares = products.diagonal()
    return (squares[:, None] + squares[None] - 2 * products).clamp(min=0)


def _pairs(sent: State, base: State) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each tensor with an update, and what the update is relative to."""
    for (_, value), (_, start) in zip(named_tensors(sent), named_tensors(base), strict=True):
        if not is_counter(value):
            yield value, start


def _difference(value: Tensor, start: Tensor) -> Tensor:
    return as_real(value - start).flatten()


def _blocks_of(values: Sequence[Tensor], start: Tensor) -> Iterator[Tensor]:
    """Yield the updates of a tensor, a block of coordinates at a time, real [clients, numbers]."""
    origin = as_real(start).flatten()
    numbers = [as_real(value).flatten() for value in values]
    for place in range(0, max(1, len(origin)), _COLUMNS):
        part = slice(place, place + _COLUMNS)
        yield torch.stack([number[part] - origin[part] for number in numbers])


def _like(numbers: Tensor, value: Tensor) -> Tensor:
    """Return real `numbers` as complex ones if `value` is complex."""
    if value.is_complex():
        return torch.view_as_complex(numbers)
    return numbers
