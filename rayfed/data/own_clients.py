"""A researcher's own clients, given as arrays or tensors in place of a dataset and a partition."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rayfed.data.population import Client, Examples, Population
from rayfed.errors import UsageError


def own_clients(clients: Sequence[Client | Mapping[str, Any]], num_classes: int | None = None) -> Population:
    """A population of the user's own clients.

    Each is a `Client`, or a mapping with `train` and `test` (and, if wanted, `val` and `domain`), each part a pair
    (x [n, ...], y [n] or [n, ...]) of arrays or tensors. uint8 images are scaled to [0, 1]; anything else reaches the
    model as it is. `num_classes` is one more than the largest label where it is not given.
    """
    made = [client if isinstance(client, Client) else _client(i, client) for i, client in enumerate(clients)]
    if not made:
        raise UsageError("clients: expected at least one")
    made = [dataclasses.replace(client, id=i) for i, client in enumerate(made)]
    labels = [part.y for client in made for part in (client.train, client.val, client.test) if len(part)]
    whole = all(label.dtype.kind in "iu" for label in labels)
    least = int(max(label.max() for label in labels)) + 1 if whole else 1
    if num_classes is None:
        num_classes = least if whole else 1
    if whole and num_classes < least:
        raise UsageError(f"num_classes={num_classes}: the labels go up to {least - 1}, so there are at least {least}")
    return Population("clients", tuple(made), num_classes, tuple(made[0].train.x.shape[1:]))


def _client(number: int, given: Mapping[str, Any]) -> Client:
    known = {"train", "val", "test", "domain"}
    for key in given:
        if key not in known:
            raise UsageError(f"clients[{number}]: {key!r} is not one of {', '.join(sorted(known))}")
    for key in ("train", "test"):
        if key not in given:
            raise UsageError(f"clients[{number}]: {key!r} is missing; give a pair (x, y)")
    train = _examples(given["train"], f"clients[{number}].train")
    nothing = Examples(train.x[:0], train.y[:0])
    val = _examples(given["val"], f"clients[{number}].val") if given.get("val") is not None else nothing
    domain = str(given.get("domain", f"client-{number}"))
    return Client(number, domain, train, val, _examples(given["test"], f"clients[{number}].test"))


def _examples(pair: Any, where: str) -> Examples:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(f"{where}: expected a pair (x, y), got {type(pair).__name__}")
    x, y = (part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in pair)
    if len(x) != len(y):
        raise UsageError(f"{where}: {len(x)} inputs but {len(y)} labels")
    x = x.astype(np.float32) if x.dtype == np.float64 else x
    y = y.astype(np.int64) if y.dtype.kind in "iu" else y.astype(np.float32)
    return Examples(x, y)
