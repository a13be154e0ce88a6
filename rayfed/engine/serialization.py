"""State as bytes: for a file, its size, and its hash."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rayfed.algorithm import Algorithm, Context
from rayfed.core.ids import ClientIndex
from rayfed.core.trees import named_tensors, nbytes, tree_map


def tensor_bytes(tensor: Tensor) -> np.ndarray:
    """Return the bytes of a tensor of any dtype in row-major order, uint8 [n]; memory may be shared with it."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def serialised(state: Any) -> memoryview:
    """Return a state as bytes for a file, which `torch.load` reads with `weights_only=True`."""
    buffer = io.BytesIO()
    torch.save(tree_map(_whole, state), buffer)
    return buffer.getbuffer()


def _whole(tensor: Tensor) -> Tensor:
    """Return `tensor` on the CPU; a view is copied, because torch would save the whole tensor behind it."""
    tensor = tensor.detach().cpu()
    is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
    return tensor.clone() if is_view else tensor


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


def outcome_hash(server: Any, clients: Mapping[ClientIndex, Any]) -> str:
    """Return the hash of a simulation's outcome from the states of the server and of the clients, each read once."""
    digest = hashlib.blake2b(f"server {state_hash(server)}".encode(), digest_size=16)
    for client in sorted(clients):
        digest.update(f"|{client} {state_hash(clients[client])}".encode())
    return digest.hexdigest()
