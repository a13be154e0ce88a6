"""A divided dataset in words, and a population as one hash."""

import hashlib

import numpy as np

from rayfed.data.dataset import Dataset, Part
from rayfed.data.leakage_groups import unheld
from rayfed.data.partitions.table import client_domain, partition_hash
from rayfed.data.population import Examples, Population

ROWS = 60  # clients shown in a table; the rest are counted
BLOCK = 1024  # examples that are hashed at once


def describe(dataset: Dataset, parts: list[Part]) -> str:
    """A text table: each client's domain, samples for training, validation and test, and classes it trains on."""
    rows: list[tuple[str, ...]] = [("client", "domain", "train", "val", "test", "classes")]
    for part in parts[:ROWS]:
        sizes = [f"{len(own):,}" for own in part[2:]]
        rows.append((str(part.id), client_domain(dataset, part), *sizes, _classes(dataset.labels[part.train])))
    if len(parts) > ROWS:
        rows.append(("…", f"{len(parts) - ROWS} more", "", "", "", ""))
    totals = [sum(map(len, column)) for column in zip(*(part[2:] for part in parts), strict=True)]
    rows.append(("all", "", *(f"{total:,}" for total in totals), str(dataset.num_classes)))
    for test in dataset.tests:
        rows.append(_server(test.domain, test.examples.y, test.split))
    for name in dataset.ood:
        rows.append(_server(name, dataset.labels[unheld(dataset, parts, name)], "ood"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if 2 <= position <= 4 else text.ljust(width)
            for position, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    shape = " x ".join(map(str, dataset.images.shape[1:]))
    plural = "s" * (len(parts) > 1)
    head = f"{dataset.name}: {len(parts)} client{plural}, {dataset.num_classes} classes, inputs {shape}"
    return "\n".join([head, *lines, f"partition {partition_hash(dataset, parts)}"])


def _server(domain: str, labels: np.ndarray, split: str) -> tuple[str, ...]:
    return ("server", domain, "", "", f"{len(labels):,}", f"{_classes(labels)} ({split})")


def _classes(labels: np.ndarray) -> str:
    """The classes, where they fit on a line: "0 3 7", else how many there are."""
    found = np.unique(labels)
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
        for start in range(0, len(array), BLOCK):  # block by block: there may be more than fits into memory
            found.update(np.ascontiguousarray(array[start : start + BLOCK]).data)
