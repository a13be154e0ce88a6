"""What can change about a module or a loss beside its weights: attributes, constants, and variables of closures."""

import inspect
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from rayfed.experiments.user_code import object_hash

_TORCHS = frozenset(vars(nn.Module()))


def attribute_hashes(kind: str, value: Any) -> dict[str, str]:
    """Return hashes of what can change about a model or a loss beside its weights, by dotted names.

    Args:
        kind: The first part of the names, such as "model".
        value: A module, a function, or any other object.
    """
    hashes = {}
    if not isinstance(value, nn.Module):
        for key, part in _parts(value):
            hashes[f"{kind}.{key}"] = object_hash(part, everywhere=True)
        hashes[kind] = object_hash(value, everywhere=True)
        return hashes
    for path, layer in value.named_modules():
        for key, part in _parts(layer):
            name = ".".join(filter(None, [kind, path, key]))
            hashes[name] = object_hash(part, everywhere=True)
    return hashes


def _parts(holder: Any) -> Iterator[tuple[str, Any]]:
    for key, part in getattr(holder, "__dict__", {}).items():
        if key not in _TORCHS:
            yield key, part
    yield from getattr(holder, "_buffers", {}).items()
    for key, part in getattr(holder, "_parameters", {}).items():
        if part is not None and not part.requires_grad:
            yield key, part._version
    if isinstance(holder, types.FunctionType):
        yield from inspect.getclosurevars(holder).nonlocals.items()
