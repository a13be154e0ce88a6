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
        return f"{self.name} {'x'.join(map(str, self.shape)) or 'scalar'}"


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
        leaves, start = list[Leaf](), 0
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
        shapes = {leaf.name: leaf.shape for leaf in self.leaves}
        return shapes if self.by_name else tuple(shapes.values())

    def normalised(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Layout":
        """Return the layout with the normalisation of a dataset, which is that of its only part of uint8."""
        images = [leaf for leaf in self.leaves if leaf.dtype == "uint8"]
        if len(images) != 1:
            return self
        return replace(self, leaves=tuple(x._replace(mean=mean, std=std) if x in images else x for x in self.leaves))

    def pack(self, parts: Sequence[np.ndarray], out: np.ndarray | None = None) -> np.ndarray:
        """Return the rows of `parts`, int32 [n, words], in `out` if it is given."""
        rows = len(parts[0])
        out = np.empty((rows, self.words), np.int32) if out is None else out
        out[:] = 0  # behind the bytes of each part
        cells = out.view(np.uint8)
        for leaf, values in zip(self.leaves, parts, strict=True):
            flat = np.ascontiguousarray(values, leaf.dtype).reshape(rows, math.prod(leaf.shape))
            cells[:, 4 * leaf.start : 4 * leaf.start + leaf.nbytes] = flat.view(np.uint8)
        return out

    def integers(self, rows: np.ndarray) -> np.ndarray:
        """Return the numbers in packed rows [n, words] that stand for words or categories, int64 [n, ...]."""
        leaves = [leaf for leaf in self.leaves if leaf.dtype in ("int32", "int64")]
        parts = (rows[:, leaf.words].copy().view(leaf.dtype) for leaf in leaves)
        return np.concatenate([np.empty((len(rows), 0), np.int64), *parts], axis=1)

    def unpack(self, x: Tensor) -> Any:
        """Return the parts of a packed batch [batch, words], as a dict or a tuple; pixels are normalised floats."""
        parts = {leaf.name: _part(leaf, x) for leaf in self.leaves}
        return parts if self.by_name else tuple(parts.values())

    def example(self, rows: int) -> Tensor:
        """Return packed rows of fixed noise, with zeros in parts of integers."""
        x, generator = torch.zeros(rows, self.words, dtype=torch.int32), torch.Generator().manual_seed(0)
        for leaf in self.leaves:
            if leaf.dtype == "float32":
                noise = torch.randn(rows, math.prod(leaf.shape), generator=generator)
                x[:, leaf.words] = noise.view(torch.int32)
        return x

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments of the model for a packed batch; others are left as they are."""
        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, Tensor) or x.dtype != torch.int32 or x.shape[1:] != (self.words,):
            return None
        parts = self.unpack(x)
        return ((), parts) if self.by_name else (parts, {})

    def attach(self, module: nn.Module) -> Any:
        """Let `module` take packed batches; return the handle of the hook.

        Raises:
            UsageError: The model's forward pass does not take these parts.
        """
        parts, signature, kind = self.shapes(), inspect.signature(module.forward), type(module).__name__
        try:
            signature.bind(**parts) if self.by_name else signature.bind(*parts)
        except TypeError as error:
            raise UsageError(
                f"model {kind}: forward takes {', '.join(signature.parameters)}; the inputs are {self} ({error})"
            ) from error
        return module.register_forward_pre_hook(self, with_kwargs=True)


def layout_of(module: nn.Module) -> Layout | None:
    """Return the layout by which a model takes its inputs, None for one array."""
    hooks = (hook for layer in module.modules() for hook in layer._forward_pre_hooks.values())
    return next((hook for hook in hooks if isinstance(hook, Layout)), None)


def _part(leaf: Leaf, x: Tensor) -> Tensor:
    words = x[:, leaf.words].clone(memory_format=torch.contiguous_format)  # a view may begin where int64 cannot
    dtype = getattr(torch, leaf.dtype)
    values = _viewed(words, torch.uint8)[:, : leaf.nbytes] if dtype.itemsize == 1 else _viewed(words, dtype)
    values = values.reshape(len(x), *leaf.shape)
    if dtype == torch.bool:
        return values != 0
    if dtype != torch.uint8:
        return values
    if len(leaf.mean) == 1:  # without a copy to the device
        return values.float().mul(1 / (255 * leaf.std[0])).sub(leaf.mean[0] / leaf.std[0])
    mean, std = (x.new_tensor(numbers, dtype=torch.float32).view(-1, 1, 1) for numbers in (leaf.mean, leaf.std))
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
