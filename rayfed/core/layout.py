"""Inputs of several parts, such as an image and a table: packed into one row of words, and unpacked for the model."""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from rayfed.core.errors import UsageError


class Leaf(NamedTuple):
    """One part of an input: its name or position, numpy dtype, shape, first word, and normalisation of uint8 pixels."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @property
    def nbytes(self) -> int:
        """The bytes of one row."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def words(self) -> slice:
        """The words of a row that hold it."""
        return slice(self.start, self.start + -(-self.nbytes // 4))

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape))
        return f"{self.name} {shape or 'scalar'}"


@dataclass(frozen=True)
class Layout:
    """Where the parts of an input lie in a row, int32 [words]. Each part begins with a new word.

    Everything that moves rows sees one array. The layout is a forward pre-hook of the model, which turns a packed batch
    into the arguments of its forward pass.

    Attributes:
        leaves: The parts in order.
        by_name: Whether the model takes them by keyword, in place of by position.
    """

    leaves: tuple[Leaf, ...]
    by_name: bool

    @classmethod
    def of(cls, parts: Sequence[tuple[str, str, tuple[int, ...]]], *, by_name: bool) -> "Layout":
        """Return the layout of parts that are given as names, dtypes and shapes of one row."""
        leaves = list[Leaf]()
        start = 0
        for name, dtype, shape in parts:
            leaves.append(Leaf(name, dtype, shape, start))
            start = leaves[-1].words.stop
        return cls(tuple(leaves), by_name)

    @property
    def words(self) -> int:
        """The length of a row."""
        return int(self.leaves[-1].words.stop)

    def __str__(self) -> str:
        return ", ".join(map(str, self.leaves))

    def shapes(self) -> Any:
        """Return the shapes of the parts, as a dict or a tuple."""
        shapes = {}
        for leaf in self.leaves:
            shapes[leaf.name] = leaf.shape
        if self.by_name:
            return shapes
        return tuple(shapes.values())

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Layout":
        """Return the layout with the normalisation of a dataset, which is that of its only part of uint8."""
        images = [leaf for leaf in self.leaves if leaf.dtype == "uint8"]
        if len(images) != 1:
            return self
        leaves = []
        for leaf in self.leaves:
            if leaf in images:
                leaf = leaf._replace(mean=mean, std=std)
            leaves.append(leaf)
        return replace(self, leaves=tuple(leaves))

    def pack(self, parts: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Return the rows of `parts`, int32 [n, words], in `out` if it is given."""
        rows = len(parts[0])
        if out is None:
            out = np.empty((rows, self.words), np.int32)
        out[:] = 0  # behind the bytes of each part
        cells = out.view(np.uint8)
        for leaf, values in zip(self.leaves, parts, strict=True):
            size = math.prod(leaf.shape)
            flat = np.ascontiguousarray(values, leaf.dtype).reshape(rows, size)
            first = 4 * leaf.start
            cells[:, first : first + leaf.nbytes] = flat.view(np.uint8)
        return out

    def integers(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in packed rows [n, words] that stand for words or categories, int64 [n, ...]."""
        parts = [np.empty((len(rows), 0), np.int64)]
        for leaf in self.leaves:
            if leaf.dtype in ("int32", "int64"):
                parts.append(rows[:, leaf.words].copy().view(leaf.dtype))
        return np.concatenate(parts, axis=1)

    def unpack(self, x: Tensor) -> Any:
        """Return the parts of a packed batch [batch, words], as a dict or a tuple; pixels are normalised floats."""
        parts = {}
        for leaf in self.leaves:
            parts[leaf.name] = _part(leaf, x)
        if self.by_name:
            return parts
        return tuple(parts.values())

    def example(self, rows: int, integer: int = 0) -> Tensor:
        """Return packed rows of fixed noise, with `integer` everywhere in parts of integers; pixels are 0."""
        x = torch.zeros(rows, self.words, dtype=torch.int32)
        generator = torch.Generator().manual_seed(0)
        for leaf in self.leaves:
            if leaf.dtype == "float32":
                noise = torch.randn(rows, math.prod(leaf.shape), generator=generator)
                x[:, leaf.words] = noise.view(torch.int32)
            elif leaf.dtype != "uint8":
                numbers = np.full((rows, leaf.nbytes // np.dtype(leaf.dtype).itemsize), integer, leaf.dtype)
                row_bytes = x.numpy().view(np.uint8)
                first = 4 * leaf.start
                row_bytes[:, first : first + leaf.nbytes] = numbers.view(np.uint8)
        return x

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the model for a packed batch; others are left as they are."""
        x = None
        if len(args) == 1 and not kwargs:
            x = args[0]
        if not isinstance(x, Tensor) or x.dtype != torch.int32:
            return None
        if x.shape[1:] != (self.words,):
            return None
        parts = self.unpack(x)
        if self.by_name:
            return ((), parts)
        return (parts, {})

    def attach(self, module: nn.Module) -> Any:
        """Let `module` take packed batches; return the handle of the hook.

        Raises:
            UsageError: The model's forward pass does not take these parts.
        """
        parts = self.shapes()
        signature = inspect.signature(module.forward)
        kind = type(module).__name__
        try:
            if self.by_name:
                signature.bind(**parts)
            else:
                signature.bind(*parts)
        except TypeError as error:
            taken = ", ".join(signature.parameters)
            raise UsageError(f"model {kind}: forward takes {taken}; the inputs are {self} ({error})") from error
        return module.register_forward_pre_hook(self, with_kwargs=True)


def layout_of(module: nn.Module) -> Layout | None:
    """Return the layout by which a model takes its inputs, None for one array."""
    for layer in module.modules():
        for hook in layer._forward_pre_hooks.values():
            if isinstance(hook, Layout):
                return hook
    return None


def _part(leaf: Leaf, x: Tensor) -> Tensor:
    words = x[:, leaf.words].clone(memory_format=torch.contiguous_format)  # a view may begin where int64 cannot
    dtype = getattr(torch, leaf.dtype)
    if dtype.itemsize == 1:
        values = _viewed(words, torch.uint8)[:, : leaf.nbytes]
    else:
        values = _viewed(words, dtype)
    values = values.reshape(len(x), *leaf.shape)
    if dtype == torch.bool:
        return values != 0
    if dtype != torch.uint8:
        return values
    if len(leaf.mean) == 1:  # without a copy to the device
        scale = leaf.std[0]
        return values.float().mul(1 / (255 * scale)).sub(leaf.mean[0] / scale)
    mean = x.new_tensor(leaf.mean, dtype=torch.float32).view(-1, 1, 1)
    std = x.new_tensor(leaf.std, dtype=torch.float32).view(-1, 1, 1)
    return values.float().mul(1 / (255 * std)).sub(mean / std)


def _viewed(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Return contiguous words as numbers of another dtype, also under `vmap`, which views so only after torch 2.11."""
    try:
        return words.view(dtype)
    except RuntimeError:
        return cast(Tensor, _View.apply(words, dtype))  # type: ignore[no-untyped-call]  # takes six times as long


class _View(torch.autograd.Function):
    @staticmethod
    def forward(words: Tensor, dtype: torch.dtype) -> Tensor:
        return words.view(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing: integers have no gradients. `vmap` asks for this method."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int, None], words: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
        return _viewed(words.movedim(in_dims[0], 0), dtype), 0
