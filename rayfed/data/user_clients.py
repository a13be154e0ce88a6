"""A researcher's own clients, given as arrays or tensors in place of a dataset and a partition."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from rayfed.core.errors import UsageError
from rayfed.data.population import Client, Examples, Population


def user_population(
    clients: Sequence[Client | Mapping[str, Any]], num_classes: int | None = None, *, classes: bool = True
) -> Population:
    """A population of the user's own clients.

    Each is a `Client`, or a mapping with `train` and `test` (and, if wanted, `val` and `domain`), each part a pair
    (x [n, ...], y [n]) of arrays or tensors. uint8 images are scaled to [0, 1]; anything else reaches the model as it
    is. `num_classes` is one more than the largest label where it is not given. `classes` says that labels are classes:
    whole numbers from 0, also as floats or in a column [n, 1]; without it y is what the user's own loss takes.

    Raises:
        UsageError: naming the client and the part at fault.
    """
    if isinstance(clients, Mapping) or not isinstance(clients, Iterable):
        raise UsageError(f"clients: expected a list, {_ONE}; got {type(clients).__name__}")
    made = [client if isinstance(client, Client) else _client(i, client, classes) for i, client in enumerate(clients)]
    if not made:
        raise UsageError("clients: expected at least one")
    made = [dataclasses.replace(client, id=i) for i, client in enumerate(made)]
    _check_alike(made)
    labels = [part.y for client in made for part in (client.train, client.val, client.test) if len(part)]
    whole = all(label.dtype.kind in "iu" for label in labels)
    least = int(max((label.max() for label in labels), default=0)) + 1 if whole else 1
    if num_classes is None:
        num_classes = least if whole else 1
    if whole and num_classes < least:
        raise UsageError(f"num_classes={num_classes}: the labels go up to {least - 1}, so there are at least {least}")
    return Population("clients", tuple(made), num_classes, tuple(made[0].train.x.shape[1:]))


def _client(number: int, given: Any, classes: bool) -> Client:
    where = f"clients[{number}]"
    if not isinstance(given, Mapping):
        raise UsageError(f"{where}: expected {_ONE}, got {type(given).__name__}")
    known = {"train", "val", "test", "domain"}
    for key in given:
        if key not in known:
            raise UsageError(f"{where}: {key!r} is not one of {', '.join(sorted(known))}")
    for key in ("train", "test"):
        if key not in given:
            raise UsageError(f"{where}: {key!r} is missing; give a pair (x, y)")
    train = _examples(given["train"], f"{where}.train", classes)
    nothing = Examples(train.x[:0], train.y[:0])
    val = _examples(given["val"], f"{where}.val", classes) if given.get("val") is not None else nothing
    domain = str(given.get("domain", f"client-{number}"))
    return Client(number, domain, train, val, _examples(given["test"], f"{where}.test", classes))


def _examples(pair: Any, where: str, classes: bool) -> Examples:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise UsageError(f"{where}: expected a pair (x, y), got {type(pair).__name__}")
    x, y = (part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in pair)
    if not x.ndim or not y.ndim:
        raise UsageError(f"{where}: expected arrays x [n, ...] and y [n], got a single number")
    if len(x) != len(y):
        raise UsageError(f"{where}: {len(x)} inputs but {len(y)} labels")
    if x.dtype.kind not in "biuf":
        raise UsageError(f"{where}: x has the type {x.dtype}; give numbers, as x.astype('float32')")
    x = x.astype(np.float32) if x.dtype == np.float64 else x
    return Examples(x, _classes(y, where) if classes else _targets(y, where))


def _classes(y: np.ndarray, where: str) -> np.ndarray:
    """Labels as int64 [n]: whole numbers from 0, which pandas gives as floats where a column once had gaps."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise UsageError(f"{where}: y has the shape {y.shape}; expected one class for each of {len(y)} examples, [n]")
    y = _targets(y, where)
    bad = y[(y < 0) | (y != np.floor(y))]  # NaN equals nothing
    if len(bad):
        raise UsageError(
            f"{where}: label {bad[0]:g}; a class is a whole number from 0 (for anything else give a loss of your own)"
        )
    return y.astype(np.int64)


def _targets(y: np.ndarray, where: str) -> np.ndarray:
    """Labels as int64 or float32."""
    if y.dtype.kind not in "biuf":
        # object: numbers from a table of mixed columns
        texts = [value for value in y.reshape(-1).tolist() if not isinstance(value, (int, float))]
        if texts:
            raise UsageError(
                f"{where}: label {texts[0]!r} is no number; number the classes of all clients from 0, as by "
                "classes.index(label)"
            )
        y = y.astype(np.float64)
    return y.astype(np.int64) if y.dtype.kind in "biu" else y.astype(np.float32)


def _check_alike(clients: Sequence[Client]) -> None:
    """One model serves all clients, so all inputs have one shape and one type."""
    first = clients[0].train.x
    for number, client in enumerate(clients):
        for name, part in (("train", client.train), ("val", client.val), ("test", client.test)):
            where, x = f"clients[{number}].{name}", part.x
            if len(part) and (x.shape[1:] != first.shape[1:] or x.dtype != first.dtype):
                here, there = (f"{tuple(one.shape[1:])} of {one.dtype}" for one in (x, first))
                raise UsageError(f"{where}: an input is {here}, but in clients[0].train {there}; give all alike")
            if x.dtype == np.uint8 and x.ndim < 3:
                raise UsageError(
                    f"{where}: x [n, ...] of uint8 with the shape {tuple(x.shape)}; uint8 is for images [n, channels, "
                    "height, width], so give numbers of a table as x.astype('float32')"
                )


_ONE = 'each client as {"train": (x, y), "test": (x, y), "domain": "a name"}'
