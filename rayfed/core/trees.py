"""Trees, nested dicts, lists and tuples whose leaves are tensors: arithmetic, bytes for a file, sizes and hashes.

No function modifies its arguments.
"""

import hashlib
import io
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.core.ids import ClientIndex

Weights = dict[str, Tensor]
"""Parameters and buffers by name, as in a `state_dict`."""


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply `fn` to every tensor of `tree` and its counterparts in `rest`; keep None and plain values as they are."""
    if isinstance(tree, Tensor):
        return fn(tree, *rest)
    if isinstance(tree, dict):
        mapped = {}
        for key in tree:
            counterparts = [other[key] for other in rest]
            mapped[key] = tree_map(fn, tree[key], *counterparts)
        return mapped
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        fields = []
        for leaves in zip(tree, *rest, strict=True):
            fields.append(tree_map(fn, *leaves))
        return type(tree)(*fields)
    if isinstance(tree, (list, tuple)):
        items = [tree_map(fn, *leaves) for leaves in zip(tree, *rest, strict=True)]
        return type(tree)(items)
    return tree


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of `tree` with its dotted path, in a fixed order."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from named_tensors(value, _joined(path, key))
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from named_tensors(value, _joined(path, index))


def _joined(path: str, key: object) -> str:
    """Return the dotted path of what `key` holds in the tree at `path`."""
    if path:
        return f"{path}.{key}"
    return str(key)


def nbytes(tree: Any) -> int:
    """Return the size of all tensors of `tree` in bytes, as sent over the network."""
    return sum(tensor.nbytes for tensor in leaves(tree))


def numel(weights: Weights) -> int:
    """Return the number of entries of all tensors of `weights`."""
    return sum(value.numel() for value in weights.values())


def leaves(tree: Any) -> list[Tensor]:
    """Return every tensor of `tree`, in a fixed order and several times as fast as with their paths."""
    found = list[Tensor]()
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Tensor):
            found.append(node)
        elif isinstance(node, (dict, list, tuple)):
            if isinstance(node, dict):
                node = node.values()
            left += node
    return found


def zeros_like(tree: Any) -> Any:
    """Return `tree` with every tensor replaced by zeros."""
    return tree_map(torch.zeros_like, tree)


def clone(tree: Any) -> Any:
    """Return a copy of `tree` with copies of all tensors."""
    return tree_map(torch.clone, tree)


def detach(tree: Any) -> Any:
    """Return `tree` with all tensors detached from the autograd graph."""
    return tree_map(Tensor.detach, tree)


def add(a: Any, b: Any, *, alpha: float | Tensor = 1.0) -> Any:
    """Return a + alpha·b."""
    if isinstance(alpha, Tensor):  # as a number it would have to be read from its device
        return tree_map(lambda x, y: x + alpha * y, a, b)
    return tree_map(lambda x, y: torch.add(x, y, alpha=alpha), a, b)


def sub(a: Any, b: Any) -> Any:
    """Return a − b."""
    return tree_map(torch.sub, a, b)


def scale(tree: Any, factor: float | Tensor) -> Any:
    """Return `tree` multiplied by `factor`."""
    return tree_map(lambda x: x * factor, tree)


def dot(a: Weights, b: Weights) -> Tensor:
    """Return ⟨a, b⟩ over all entries of `a`, a scalar."""
    products = []
    for name, value in a.items():
        products.append((value * b[name]).sum())
    return torch.stack(products).sum()


def norm(weights: Weights) -> Tensor:
    """Return the Euclidean norm over all entries of `weights`, a scalar."""
    squares = []
    for value in weights.values():
        squares.append(value.square().sum())
    return torch.stack(squares).sum().sqrt()


def as_real(tensor: Tensor) -> Tensor:
    """Return the real and imaginary parts [..., 2] of a complex tensor, and any other as it is; memory is shared."""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    return tensor


def is_counter(tensor: Tensor) -> bool:
    """Return whether a tensor holds integers or truth values, of which there is no mean."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def all_finite(tensor: Tensor) -> Tensor:
    """Return whether all numbers of a tensor are finite, without memory of its size as torch.isfinite takes."""
    if is_counter(tensor) or not tensor.numel():
        return torch.ones((), dtype=torch.bool, device=tensor.device)
    return torch.stack(torch.aminmax(as_real(tensor))).isfinite().all()


def mean_of(values: Tensor, shares: Tensor) -> Tensor:
    """Return the mean of `values` [n, ...] with `shares` [n]; of counters, the maximum."""
    if is_counter(values):
        return values.amax(0)
    return finite_mean(torch.tensordot(shares.to(values.dtype), values, 1), values)


def finite_mean(mean: Tensor, values: Tensor) -> Tensor:
    """Return the `mean` of `values` [n, ...], with the values where all are the same infinite number."""
    is_kept = mean.isfinite() | (values != values[0]).any(0)
    return torch.where(is_kept, mean, values[0])


def stack(trees: list[Any]) -> Any:
    """Stack the tensors of `trees` along a new leading dimension."""
    return tree_map(lambda *leaves: torch.stack(leaves), trees[0], *trees[1:])


def unstack(tree: Any, count: int) -> list[Any]:
    """Invert `stack`. The tensors are copies, so that none keeps the stacked tensor in memory."""
    trees = []
    for index in range(count):
        trees.append(tree_map(lambda x, index=index: x[index].clone(), tree))
    return trees


def _owned(tensor: Tensor) -> Tensor:
    """Return a copy of a slice of a larger tensor, and another tensor as it is."""
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        return tensor.clone()
    return tensor


def owned(tree: Any) -> Any:
    """Return `tree` with copies of the tensors that are slices of larger ones, so that they do not keep these."""
    return tree_map(_owned, tree)


def only(weights: Weights, names: Container[str]) -> Weights:
    """Return the entries of `weights` whose names are in `names`, in the order of `weights`."""
    return {name: value for name, value in weights.items() if name in names}


def without(weights: Weights, names: Container[str]) -> Weights:
    """Return the entries of `weights` whose names are not in `names`, in the order of `weights`."""
    return {name: value for name, value in weights.items() if name not in names}


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any dtype in row-major order, uint8 [n]; memory may be shared with it."""
    on_cpu = tensor.detach().cpu().contiguous()
    return on_cpu.reshape(-1).view(torch.uint8).numpy()


def serialised(state: Any) -> memoryview:
    """Return a state as bytes for a file, which `torch.load` reads with `weights_only=True`."""
    buffer = io.BytesIO()
    torch.save(tree_map(_whole, state), buffer)
    return buffer.getbuffer()


def _whole(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU; a view is copied, because torch would save the whole tensor behind it."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    if is_view:
        return tensor.clone()
    return tensor


def bytes_by_field(payload: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of every top-level field that has any."""
    sizes = {}
    for field, value in payload.items():
        sizes[field] = nbytes(value)
    return {field: size for field, size in sizes.items() if size}


def state_hash(tree: Any) -> str:
    """Return a hash of the names, dtypes, shapes and bits of all tensors, equal only for bit-identical trees."""
    digest = hashlib.blake2b(digest_size=16)
    in_order = sorted(named_tensors(tree), key=lambda named: named[0])
    for path, tensor in in_order:
        form = f"{path}|{tensor.dtype}|{tuple(tensor.shape)}|"
        digest.update(form.encode())
        digest.update(tensor_bytes(tensor).data)
    return digest.hexdigest()


def outcome_hash(server: Any, clients: Mapping[ClientIndex, Any]) -> str:
    """Return the hash of a simulation's outcome from the states of the server and of the clients, each read once."""
    digest = hashlib.blake2b(f"server {state_hash(server)}".encode(), digest_size=16)
    for client in sorted(clients):
        of_client = f"|{client} {state_hash(clients[client])}"
        digest.update(of_client.encode())
    return digest.hexdigest()
