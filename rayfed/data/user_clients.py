"""A user's own clients, given as arrays or tensors in place of a dataset and a partition."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError, printable
from rayfed.core.layout import Layout
from rayfed.core.options import checked
from rayfed.core.rng import global_generators_seeded
from rayfed.data.inputs import (
    MOST_CLASSES,
    as_array,
    as_float32,
    check_finite,
    check_float32,
    check_inputs,
    class_labels,
    count_classes,
    is_tree,
    model_inputs,
    packed,
)
from rayfed.data.population import SPLITS, Client, ClientTable, Examples, MadeClients, Population, content_hash

_FORM = 'each client as {"train": (x, y), "test": (x, y)}, and "val": (x, y) and "domain": "a name" if there are any'


@dataclass(frozen=True)
class Clients:
    """Clients that are made when they are needed, in place of a list, where there are too many to hold in memory.

    Example:
        >>> sizes = {"train": np.full(1_000_000, 8), "test": np.full(1_000_000, 2)}
        >>> rayfed.run("fedavg", clients=rayfed.Clients(sizes, make), num_classes=10, cohort=100)

    Attributes:
        sizes: How many examples each client has in "train", in "test" and, if there are any, in "val", integers [N].
        make: Called with the number of a client, 0 to N - 1. Returns the client as in a list: a mapping of "train",
            "test" and "val" to pairs (x [n, ...], y [n]). It must return the same ones whenever it is called. A client
            that trains on several machines, or in several rounds, is made anew.
        domains: The domain of each client, strings [N]; None: each client is a domain of its own.
    """

    sizes: Mapping[str, Sequence[int] | np.ndarray]
    make: Callable[[int], Mapping[str, Any]]
    domains: Sequence[str] | None = None

    def columns(self) -> np.ndarray:
        """Return the sizes of the training, validation and test parts, int64 [N, 3]."""
        if not isinstance(self.sizes, Mapping) or not {"train", "test"} <= set(self.sizes) <= set(SPLITS):
            raise UsageError(
                f'clients.sizes: got {self.sizes!r:.99}; expected {{"train": [...], "test": [...]}} with a number of '
                'examples for each client, and "val" if there are any'
            )
        none = np.zeros(len(self.sizes["train"]), int)
        parts = {split: np.asarray(self.sizes.get(split, none)) for split in SPLITS}
        count = len(parts["train"])
        if self.domains is not None:
            count = len(self.domains)
        for split, sizes in parts.items():
            if not count or sizes.shape != (count,) or sizes.dtype.kind not in "iu" or (sizes < 0).any():
                form = f"{sizes.dtype} {list(sizes.shape)}"
                raise UsageError(f"clients.sizes[{split!r}]: got {form}; expected {count} integers from 0")
        return np.stack(list(parts.values()), axis=1).astype(np.int64)


@dataclass(frozen=True)
class _Maker:
    """Makes clients of a user's `Clients`, and checks them as those of a list.

    All examples are like `first`, the training part of the first client, as soon as that client has been made.
    """

    make: Callable[[int], Mapping[str, Any]]
    classes: bool
    num_classes: int
    first: Examples | None = None

    def __call__(self, number: int) -> tuple[Examples, Examples, Examples]:
        layout = None
        if self.first is not None:
            layout = self.first.layout
        with global_generators_seeded(0, "make", client=number):
            given = self.make(number)
        client = _client(number, given, self.classes, layout)
        if self.first is None:
            first = client.train
        else:
            first = self.first
        for split, part in zip(SPLITS, client.parts, strict=True):
            where = f"clients[{number}].{split}"
            _check_part(where, part, first)
            if self.classes and part.y.ndim == 1:
                count_classes(where, [part.y], "num_classes", self.num_classes)
        return client.parts


def _made_population(clients: Clients, num_classes: int | None, *, classes: bool) -> Population:
    """Return a population of clients that are made on demand; the first and the last one are made at once, twice."""
    sizes = clients.columns()
    _check_callable(clients.make)
    if num_classes is None and classes:
        raise UsageError("num_classes: give the number of classes with rayfed.Clients, whose labels are not all read")
    maker = _Maker(clients.make, classes, num_classes or 1)
    made = MadeClients(maker, sizes)
    first = _made_twice(made, 0)[0]
    if len(sizes) > 1:
        _made_twice(made, len(sizes) - 1)
    maker = replace(maker, first=first.select(slice(0)))
    domains = clients.domains
    if domains is None:
        domains = []
        for number in range(len(sizes)):
            domains.append(f"client-{number}")
    shown = []
    for domain in domains:
        shown.append(printable(str(domain)))
    table = ClientTable(MadeClients(maker, sizes), sizes, shown)
    return _population(table, num_classes or 1, first)


def _check_callable(make: Callable[[int], Any]) -> None:
    """Raise UsageError if a function of `Clients` cannot be called with a number."""
    try:
        inspect.signature(make).bind(0)
    except TypeError as error:
        raise UsageError(f"clients.make: expected a function of the number of a client; {error}") from error
    except ValueError:  # some callables have no signature
        pass


def _made_twice(made: MadeClients, number: int) -> tuple[Examples, Examples, Examples]:
    """Return the parts of a client; UsageError if it is another one when it is made again, by draws without a seed."""
    first = made.parts(number)
    before = [content_hash(part) for part in first]
    again = made.parts(number)
    for split, digest, part in zip(SPLITS, before, again, strict=True):
        if content_hash(part) != digest:
            changed = f"make({number}) returned other {split} examples the second time"
            reason = "a client is made anew in every round"
            raise UsageError(f"clients: {changed}; {reason}, so draw from np.random.default_rng({number}) or the like")
    return first


def user_population(
    clients: Sequence[Client | Mapping[str, Any]] | Clients, num_classes: int | None = None, *, classes: bool = True
) -> Population:
    """Return a population of the user's own clients.

    Args:
        clients: Each a `Client`, or a mapping with `train` and `test`, and optionally `val` and `domain`. Its parts are
            pairs (x [n, ...], y [n]) of arrays or tensors; x may be a dict or a tuple of them. uint8 images are scaled
            to [0, 1], floats reach the model as float32, and integers as they are. Or `Clients`, which are made on
            demand.
        num_classes: Number of classes; None: the largest label plus 1.
        classes: Whether labels are classes: integers from 0, also as floats or in a column [n, 1], or at every position
            of an example. If not, y is whatever the user's own loss takes.

    Raises:
        UsageError: A client is invalid; the message names the client and the part.
    """
    if isinstance(clients, Mapping) or not isinstance(clients, (Iterable, Clients)):
        raise UsageError(f"clients: expected a list, {_FORM}; got {type(clients).__name__}")
    if num_classes is not None:
        num_classes = checked(num_classes, int, {"low": 1, "high": MOST_CLASSES}, where="num_classes")
    if isinstance(clients, Clients):
        return _made_population(clients, num_classes, classes=classes)
    made: list[Client] = []
    for number, given in enumerate(clients):
        layout = None
        if made:
            layout = made[0].train.layout
        if isinstance(given, Client):  # its arrays are checked and converted as those of a mapping
            parts = dict(zip(SPLITS, given.parts, strict=True))
            given = {"domain": given.domain, **parts}
        made.append(_client(number, given, classes, layout))
    if not made:
        raise UsageError("clients: expected at least one")
    with_rows = (client.train for client in made if len(client.train))
    first = next(with_rows, made[0].train)
    for number, client in enumerate(made):
        for split, part in zip(SPLITS, client.parts, strict=True):
            _check_part(f"clients[{number}].{split}", part, first)
    labels = [part.y for client in made for part in client.parts if len(part)]
    numbers = []
    if all(label.dtype.kind in "iu" for label in labels):
        numbers = labels
    if num_classes is not None:  # of which a mask may mark some as ignored
        numbers = [label for label in numbers if label.ndim == 1]
    if num_classes is None and not classes:  # of integers that may count from anything
        highest = max((label.max() for label in numbers), default=0)
        num_classes = int(highest) + 1
    num_classes = count_classes("clients", numbers, "num_classes", num_classes)
    return _population(ClientTable.of(made), num_classes, first)


def _population(clients: ClientTable, num_classes: int, first: Examples) -> Population:
    validated = ""
    if clients.have_validation:
        validated = "validated on their own validation examples"
    return Population("clients", clients, num_classes, first.shape, layout=first.layout, test_source=validated)


def _client(number: int, given: Any, classes: bool, layout: Layout | None) -> Client:
    where = f"clients[{number}]"
    if not isinstance(given, Mapping) or not {"train", "test"} <= set(given) <= {*SPLITS, "domain"}:
        if isinstance(given, Mapping):
            got = f"the keys {', '.join(map(str, given))}"
        else:
            got = type(given).__name__
        raise UsageError(f"{where}: got {got}; expected {_FORM}")
    train = _examples(given["train"], f"{where}.train", classes, layout)
    empty = train.select(slice(0))
    layout = train.layout
    if given.get("val") is not None:
        val = _examples(given["val"], f"{where}.val", classes, layout)
    else:
        val = empty
    if given.get("domain") is None:
        domain = f"client-{number}"
    else:
        domain = printable(str(given["domain"]))
    test = _examples(given["test"], f"{where}.test", classes, layout)
    return Client(number, domain, train, val, test)


def _examples(pair: Any, where: str, classes: bool, layout: Layout | None) -> Examples:
    if isinstance(pair, Examples):
        if pair.layout is not None:  # packed, and so checked
            return pair
        pair = pair.x, pair.y
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        whole = ", such as (torch.stack([x for x, y in d]), [int(y) for x, y in d]) of a torch Dataset d"
        expected = f"expected a pair (x, y) of arrays or tensors{whole}"
        raise UsageError(f"{where}: {expected}; got {type(pair).__name__}")
    x = pair[0]
    y = as_array(f"{where}: y", pair[1])
    if layout is not None or is_tree(x):
        x, layout = packed(f"{where}: x", x, layout, "clients: x")
    else:
        x = as_array(f"{where}: x", x)
    if not x.ndim or not y.ndim or len(x) != len(y):
        size_of_x = str(list(x.shape))
        if layout:
            size_of_x = f"of {len(x)} rows"
        sizes = f"x {size_of_x} and y {list(y.shape)}"
        raise UsageError(f"{where}: got {sizes}; expected arrays of equal length n, x [n, ...] and y [n, ...]")
    if layout is None:
        x = model_inputs(f"{where}: x", x, "clients: x")
    if classes:
        labels = _classes(y, where)
    else:
        labels = _targets(y, where)
    return Examples(x, labels, layout)


def _classes(y: np.ndarray, where: str) -> np.ndarray:
    """Return labels as int64 [n], or [n, ...] for classes at every position, where negative labels are ignored."""
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    y = _targets(y, where)
    marks = y
    if y.ndim > 1:
        marks = np.maximum(y, 0).reshape(-1)
    class_labels(where, marks)
    return y.astype(np.int64)


def _targets(y: np.ndarray, where: str) -> np.ndarray:
    """Return labels as int64 or float32."""
    if y.dtype.kind not in "biufOUS":
        raise UsageError(f"{where}: labels are {y.dtype}; give numbers, such as the seconds of times")
    if y.dtype.kind in "OUS":  # numbers from a table of mixed columns are objects
        try:
            y = y.astype(np.float64)
        except (TypeError, ValueError) as error:
            remedy = "number the classes of all clients from 0, for example by classes.index(label)"
            raise UsageError(f"{where}: labels are not numbers ({error}); {remedy}") from error
    check_float32(f"{where}: y", y, "clients: y")
    if y.dtype.kind in "biu":
        return y.astype(np.int64)
    return as_float32(f"{where}: y", y)


def _check_part(where: str, part: Examples, first: Examples) -> None:
    """Check that examples have the form of the `first` client's, and that all numbers are finite."""
    kind = (part.shape, part.dtype, part.layout)
    if len(part) and kind != (first.shape, first.dtype, first.layout):
        form = f"{part.layout or part.shape} of {part.dtype}"
        expected = f"{first.shape} of {first.dtype}"
        raise UsageError(
            f"{where}: an input is {form}, but the first client's are {expected}; all inputs must be alike"
        )
    if len(part) and part.y.shape[1:] != first.y.shape[1:]:
        shape = [len(part), *first.y.shape[1:]]
        found = f"y has the shape {part.y.shape}"
        raise UsageError(f"{where}: {found}; expected {shape}, like the first client's")
    check_inputs(where, part)
    check_finite(where, part.y)
