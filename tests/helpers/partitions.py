"""A toy dataset to divide among clients, and a partition by its name."""

import hashlib

import numpy as np

from rayfed.core.options import build
from rayfed.core.registry import resolve
from rayfed.data.dataset import Dataset
from rayfed.data.loading import check_clients, divided_clients
from rayfed.data.partitions import PARTITIONS

OWNED = {"client": np.arange(1200) % 7}


def toy(size=1200, **changes):
    """Two domains, ten classes, a fifth test examples; the labels of the second domain are skewed."""
    row = np.arange(size)
    labels = np.where(row < size // 2, row % 10, (row * row) % 7)
    return Dataset.of(
        "toy",
        np.zeros((size, 1), np.float32),
        labels,
        **{
            "is_test": row % 5 == 0,
            "num_classes": 10,
            "domain": (row >= size // 2).astype(np.int16),
            "domains": ("left", "right"),
            **changes,
        },
    )


def pin(*arrays):
    """A hash of arrays of integers, in their order."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(np.ascontiguousarray(array).astype("<i8").tobytes() + b"|")
    return found.hexdigest()[:16]


def pin_of_parts(parts):
    """A hash of who has which rows in which part, whatever their order."""
    return pin(*(np.sort(rows) for part in parts for rows in part[2:]))


def checked_clients(dataset, partition):
    """The clients of a partition, after the checks that each of them can train and that no row is used twice."""
    clients = divided_clients(dataset, partition)
    check_clients(dataset, clients)
    return clients


def split(name, dataset, **options):
    return checked_clients(dataset, build(resolve(name, PARTITIONS, where="partition"), options, where="partition"))
