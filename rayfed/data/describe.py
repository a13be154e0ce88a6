"""A population in words, and as one hash."""

import hashlib

import numpy as np

from rayfed.data.population import Examples, Population

ROWS = 60  # clients shown in a table; the rest are counted


def describe(population: Population) -> str:
    """A text table: each client's domain, samples for training, validation and test, and classes it trains on."""
    rows: list[tuple[str, ...]] = [("client", "domain", "train", "val", "test", "classes")]
    for client in population.clients[:ROWS]:
        sizes = [f"{len(part):,}" for part in (client.train, client.val, client.test)]
        rows.append((str(client.id), client.domain, *sizes, _classes(client.train)))
    if len(population.clients) > ROWS:
        rows.append(("…", f"{len(population.clients) - ROWS} more", "", "", "", ""))
    parts = [[getattr(client, name) for client in population.clients] for name in ("train", "val", "test")]
    rows.append(("all", "", *(f"{sum(map(len, part)):,}" for part in parts), str(population.num_classes)))
    for test in population.tests:
        size, classes = f"{len(test.examples):,}", f"{_classes(test.examples)} ({test.split})"
        rows.append(("server", test.domain, "", "", size, classes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if 2 <= position <= 4 else text.ljust(width)
            for position, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    shape = " x ".join(map(str, population.shape))
    head = f"{population.name}: {len(population.clients)} clients, {population.num_classes} classes, inputs {shape}"
    return "\n".join([head, *lines])


def _classes(examples: Examples) -> str:
    """The classes, where they fit on a line: "0 3 7", else how many there are."""
    if not np.issubdtype(examples.y.dtype, np.integer) or examples.y.ndim != 1:
        return "-"
    found = np.unique(examples.y)
    return " ".join(map(str, found)) if len(found) <= 10 else f"{len(found)} classes"


def fingerprint(population: Population) -> str:
    """A sha256 over everything that training and scoring see: the parts of each client in order, and the test sets."""
    found = hashlib.sha256()
    head = (population.num_classes, population.shape, population.mean, population.std)
    found.update(repr(head).encode())
    for client in population.clients:
        found.update(f"client {client.id} {client.domain}".encode())
        for part in (client.train, client.val, client.test):
            _add(found, part)
    for test in population.tests:
        found.update(f"test {test.domain} {test.split}".encode())
        _add(found, test.examples)
    return found.hexdigest()


def _add(found, examples: Examples) -> None:
    for array in (examples.x, examples.y):
        found.update(f"{array.dtype.str}{array.shape}".encode())
        found.update(np.ascontiguousarray(array).data)
