"""State on its way between processes, as flat byte arrays that Ray passes without copying; its size and its hash."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import named_tensors, nbytes, tree_map


class Packed(NamedTuple):
    """One tensor: its bytes, its dtype and its shape."""

    data: np.ndarray
    dtype: torch.dtype
    shape: tuple[int, ...]


def pack(tree: Any) -> Any:
    """Return `tree` (dicts, lists, tuples) with every tensor as a `Packed` on the CPU, in row-major order."""

    return tree_map(lambda tensor: Packed(tensor_bytes(tensor), tensor.dtype, tuple(tensor.shape)), tree)


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any dtype in row-major order, uint8 [n]; memory may be shared with it."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def unpack(tree: Any, device: torch.device) -> Any:
    """Return `tree` with every `Packed` as a new tensor on `device`."""
    if isinstance(tree, Packed):
        if not tree.data.size:
            return torch.empty(tree.shape, dtype=tree.dtype, device=device)
        raw = torch.from_numpy(tree.data.copy())  # the object store's pages are read-only
        return raw.view(tree.dtype).reshape(tree.shape).to(device)
    if isinstance(tree, dict):
        return {key: unpack(value, device) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(unpack(value, device) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(unpack(value, device) for value in tree)
    return tree


def serialised(state: Any) -> memoryview:
    """Return a state as bytes for a file, which `torch.load` reads with `weights_only=True`."""
    buffer = io.BytesIO()
    torch.save(tree_map(_whole, state), buffer)
    return buffer.getbuffer()


def _whole(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU; a view as a copy, because it would be saved with all of what it is a view of."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor


def packed_bytes(tree: Any) -> int:
    """Return the bytes of all tensors of a tree that `pack` returned."""
    if isinstance(tree, Packed):
        return tree.data.nbytes
    if isinstance(tree, dict):
        return sum(map(packed_bytes, tree.values()))
    return sum(map(packed_bytes, tree)) if isinstance(tree, (list, tuple)) else 0


def bytes_by_field(payload: dict[str, Any]) -> dict[str, int]:
    """Return the bytes of every top-level field that has any."""
    sizes = {field: nbytes(value) for field, value in payload.items()}
    return {field: size for field, size in sizes.items() if size}


def bytes_by_formula(algorithm: Algorithm, ctx: Context, examples: Sequence[int]) -> float | None:
    """Return the bytes by `Algorithm.bytes_formula`, or None if the algorithm's own class does not define it."""
    own = vars(type(algorithm)).get("bytes_formula")
    return None if own is None else own(algorithm, ctx, examples)


def state_hash(tree: Any) -> str:
    """Return a hash of the names, dtypes, shapes and bits of all tensors, equal only for bit-identical trees."""
    digest = hashlib.blake2b(digest_size=16)
    for path, tensor in sorted(named_tensors(tree), key=lambda named: named[0]):
        digest.update(f"{path}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor_bytes(tensor).data)
    return digest.hexdigest()


def outcome_hash(server: Any, clients: Mapping[ClientIndex, str]) -> str:
    """Return the hash of a simulation's outcome from the server's state and the hash of each client's state."""
    digest = hashlib.blake2b(f"server {state_hash(server)}".encode(), digest_size=16)
    for client in sorted(clients):
        digest.update(f"|{client} {clients[client]}".encode())
    return digest.hexdigest()
