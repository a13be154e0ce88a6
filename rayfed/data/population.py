"""The population: clients with their examples, and the server's test sets."""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rayfed.core.errors import UsageError
from rayfed.core.layout import Layout
from rayfed.data.clients import LOOKED_AT, SPLITS, ClientTable, Examples, MadeClients, spread

MOST_CLASSES = 1_000_000  # labels that are larger number something else, and would fill the memory with outputs


@dataclass(frozen=True)
class TestSet:
    """Examples of one domain to score the server's model on; `split` is "test" or "ood"."""

    __test__ = False  # not a pytest class

    domain: str
    split: str
    examples: Examples

    def __post_init__(self) -> None:
        if not len(self.examples):
            raise UsageError(f"test set {self.domain}: has no example that nobody trains on")


@dataclass(frozen=True)
class Population:
    """All clients, the form of their examples, and the server's test sets.

    The engine and algorithms identify clients by their position in `clients`. `Client.id` is the number that the
    partition gave them; it differs from the position only if there are unseen clients.

    Attributes:
        name: Name of the dataset.
        clients: All clients, unseen clients last.
        num_classes: Number of classes.
        shape: Shape of one input.
        mean, std: Per channel in units of [0, 1], to normalise uint8 images: (x / 255 - mean) / std.
        tests: The server's test sets.
        partition_hash: Hash of which client holds which rows of the dataset (`rayfed.data.partitions.table`); None for
            a user's own clients, whose tables show `population_hash` instead.
        unseen_clients: Number of clients that take no part in training and join when it is over.
        layout: Where the parts of an input lie in its row, if it has several; None for one array.
        test_source: On which examples clients are tested, as the end of a sentence; empty: not known.
    """

    name: str
    clients: ClientTable
    num_classes: int
    shape: tuple[int, ...]
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    tests: tuple[TestSet, ...] = ()
    partition_hash: str | None = None
    unseen_clients: int = 0
    test_source: str = ""
    layout: Layout | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", ClientTable.of(self.clients))  # any sequence of clients will do

    def examples(self) -> list[Examples]:
        """Return the examples of all clients in as few pieces as possible, then those of the test sets.

        Of clients that are made on demand, these are the examples of a few.
        """
        return [*self.clients.source.examples(), *(test.examples for test in self.tests)]

    def nbytes(self) -> int:
        """Return the bytes of all examples; those of clients made on demand are taken to be as large as the first."""
        of_one = self.clients[0].train.select(slice(1)).nbytes
        return int(self.clients.sizes.sum()) * of_one + sum(test.examples.nbytes for test in self.tests)

    def read(self) -> "Population":
        """Return the same population with all examples in memory."""
        tests = [replace(test, examples=test.examples.read()) for test in self.tests]
        return replace(self, clients=self.clients.read(), tests=tuple(tests))

    @property
    def participants(self) -> ClientTable:
        """The clients that take part in training."""
        return self.clients[: len(self.clients) - self.unseen_clients]


def count_classes(where: str, labels: Iterable[np.ndarray], key: str, given: int | None = None) -> int:
    """Return the number of classes of labels that count from 0: `given` by `key`, else the highest label plus 1.

    UsageError if a label is too high for `given` or as a class, or if no label is 0, which would be a class too many.
    """
    bounds = [(int(part.min()), int(part.max())) for part in labels if len(part)] or [(0, 0)]
    lowest, highest = min(low for low, _ in bounds), max(high for _, high in bounds)
    if given is not None and highest >= given:
        remedy = f"; classes count from 0, so subtract {lowest}" if lowest > 0 else ""
        raise UsageError(f"{where}: label {highest}, but there are {given} classes (0..{given - 1}); see {key}{remedy}")
    if given is None and lowest > 0:
        raise UsageError(
            f"{where}: the labels are {lowest} to {highest}; classes count from 0, so subtract {lowest}, or give "
            f"{key}={highest + 1} if class 0 has no example"
        )
    if given is None and highest >= MOST_CLASSES:
        raise UsageError(f"{where}: labels up to {highest} would be {highest + 1} classes, above {MOST_CLASSES}")
    return given or highest + 1


def class_labels(where: str, labels: np.ndarray, place: Callable[[int], str] | None = None) -> np.ndarray:
    """Return labels [n], numbers of any type, as int64. Integers may be floats, as pandas gives columns with gaps.

    Raises:
        UsageError: A label is no integer from 0; the message starts with `place` of the first of these, else `where`.
    """
    wrong = np.flatnonzero((labels < 0) | (labels != np.floor(labels)))  # also NaN, which is not equal to itself
    if len(wrong):
        label = labels[wrong[0]]
        remedy = "; write -1 and 1 as 0 and 1, and leave rows out that -1 marks as unlabelled" if label == -1 else ""
        raise UsageError(
            f"{place(int(wrong[0])) if place else where}: label {label:g}; a class is an integer from 0, which "
            f"{len(wrong)} of {len(labels)} labels are not{remedy}"
        )
    return labels.astype(np.int64)


def targets(where: str, labels: np.ndarray, place: Callable[[int], str] | None = None) -> np.ndarray:
    """Return labels [n, ...] as classes, int64 [n], if they are integers [n] from 0, also as floats; else as int64 or
    float32. The errors are those of `class_labels`."""
    is_float = labels.dtype.kind == "f"
    if labels.ndim == 1 and not (is_float and np.isfinite(labels).all() and (labels != np.floor(labels)).any()):
        return class_labels(where, labels, place)
    return labels.astype(np.float32 if is_float else np.int64)


def check_channels_first(where: str, shape: tuple[int, ...], dtype: "np.dtype[Any]") -> None:
    """Raise UsageError if images [n, ...] of uint8 have their channels last, as PIL and NumPy give them."""
    if dtype == np.uint8 and len(shape) == 4 and shape[1] > 4 >= shape[3]:
        expected = "images are [n, channels, height, width], so give x.transpose(0, 3, 1, 2)"
        raise UsageError(f"{where}: uint8 {list(shape)}, channels last; {expected}")


def check_inputs(where: str, part: Examples) -> None:
    """Raise UsageError if a model cannot work with inputs: images of another form, NaN or infinity."""
    check_channels_first(where, part.x.shape, part.dtype)
    if part.dtype == np.uint8 and len(part.shape) < 2:
        raise UsageError(f"{where}: uint8 {list(part.x.shape)}; uint8 is for images [n, c, h, w], so use float32")
    if part.dtype.kind == "f" and (count := sum(map(not_finite, part.blocks()))):
        remedy = "are too large for float32; remove or replace them"
        raise UsageError(f"{where}: {count} of {len(part)} inputs hold NaN or infinity, or {remedy}")


def check_finite(where: str, labels: np.ndarray) -> None:
    """Raise UsageError if labels are floats, some of which are NaN or infinity."""
    if labels.dtype.kind == "f" and (count := not_finite(labels)):
        raise UsageError(f"{where}: {count} of {len(labels)} labels hold NaN or infinity; remove or replace them")


def not_finite(values: np.ndarray) -> int:
    """Return how many rows of `values` [n, ...] hold NaN or infinity."""
    return int((~np.isfinite(values).reshape(len(values), -1).all(1)).sum()) if values.size else 0


def as_array(where: str, given: Any) -> np.ndarray:
    """Return an array or a tensor as an array whose byte order and strides torch takes; UsageError if it is none."""
    if hasattr(given, "toarray"):
        raise UsageError(f"{where} is sparse ({type(given).__name__}); give it by .toarray()")
    if isinstance(given, np.ma.MaskedArray) and given.mask.any():
        raise UsageError(f"{where} has {given.mask.sum()} masked values; fill them in, or leave these rows out")
    try:
        if hasattr(given, "detach"):  # a tensor
            given = (given.float() if given.is_floating_point() else given).detach().cpu()  # NumPy has no bfloat16
        values = np.asarray(given)
        return np.asarray(values, values.dtype.newbyteorder("="), order="C")
    except (ValueError, TypeError, RuntimeError) as error:  # rows of uneven lengths, or a dtype that only torch has
        remedy = "; rayfed.padded makes rows of one length" if "inhomogeneous" in str(error) else ""
        raise UsageError(f"{where} is no array of numbers ({' '.join(str(error).split())}){remedy}") from error


def model_inputs(where: str, given: Any) -> np.ndarray:
    """Return inputs [n, ...] as numbers with which networks compute: float32, uint8, bool or signed integers."""
    x = as_array(where, given)
    if x.dtype.kind not in "biuf":
        raise UsageError(f"{where} has the type {x.dtype}; give numbers, such as x.astype('float32')")
    if x.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return x.astype(np.float32, copy=False)
    if x.dtype == np.uint64 and (x > np.iinfo(np.int64).max).any():
        raise UsageError(f"{where} has {x.max()} of uint64, which no tensor of int64 holds; number these values anew")
    return x.astype(np.int64 if x.itemsize > 2 else np.int32) if x.dtype.kind == "u" and x.itemsize > 1 else x


def class_counts(population: Population) -> list[tuple[int, str, str, int, int]]:
    """Return client, domain, split, class and number of examples, sorted by client; none for other targets."""
    counts = []
    for client in sorted(population.clients, key=lambda client: client.id):
        for split, part in zip(SPLITS, client.parts, strict=True):
            labels = part.y
            if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
                continue
            for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
                counts.append((client.id, client.domain, split, int(label), int(count)))
    return counts


def population_hash(population: Population) -> str:
    """Return the SHA-256 of all contents: every client's parts in order, the test sets, and the normalisation.

    Of clients that are made on demand, it covers all sizes and domains, and the contents of a few.
    """
    digest = hashlib.sha256()
    head = (population.num_classes, population.shape, population.mean, population.std)
    digest.update(repr((*head, population.layout) if population.layout else head).encode())
    clients = population.clients
    places: Sequence[int] = range(len(clients))
    if isinstance(clients.source, MadeClients):
        places = spread(len(clients), LOOKED_AT)
        digest.update(np.ascontiguousarray(clients.sizes).data)
        digest.update(repr(clients.domain_names()).encode())
    for client in map(clients.__getitem__, places):
        digest.update(f"client {client.id} {client.domain}".encode())
        for part in client.parts:
            _update(digest, part)
    for test in population.tests:
        digest.update(f"test {test.domain} {test.split}".encode())
        _update(digest, test.examples)
    return digest.hexdigest()


def _update(digest: Any, examples: Examples) -> None:
    digest.update(f"{examples.dtype.str}{examples.x.shape}".encode())
    for block in examples.blocks():  # as the array may not fit into memory
        digest.update(np.ascontiguousarray(block).data)
    digest.update(f"{examples.y.dtype.str}{examples.y.shape}".encode())
    digest.update(np.ascontiguousarray(examples.y).data)
