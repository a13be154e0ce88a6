"""A text summary of a partition."""

import numpy as np

from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.leakage_groups import unheld_rows
from rayfed.data.partitions.table import client_domain, partition_hash

MAX_CLIENTS = 60  # clients listed in a table; the others are only counted


def describe(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a text table of each client's domain, numbers of training, validation and test samples, and classes."""
    rows: list[tuple[str, ...]] = [("client", "domain", "train", "val", "test", "classes")]
    for client in clients[:MAX_CLIENTS]:
        sizes = [f"{len(part):,}" for part in client[2:]]
        rows.append((str(client.id), client_domain(dataset, client), *sizes, _classes(dataset.labels[client.train])))
    if len(clients) > MAX_CLIENTS:
        rows.append(("…", f"{len(clients) - MAX_CLIENTS} more", "", "", "", ""))
    totals = [sum(map(len, column)) for column in zip(*(client[2:] for client in clients), strict=True)]
    rows.append(("all", "", *(f"{total:,}" for total in totals), str(dataset.num_classes)))
    for test in dataset.tests:
        rows.append(_server_row(test.domain, test.examples.y, test.split))
    for name in dataset.ood:
        rows.append(_server_row(name, dataset.labels[unheld_rows(dataset, clients, name)], "ood"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.rjust(width) if 2 <= position <= 4 else text.ljust(width)
            for position, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    shape = " x ".join(map(str, dataset.images.shape[1:]))
    plural = "s" * (len(clients) > 1)
    head = f"{dataset.name}: {len(clients)} client{plural}, {dataset.num_classes} classes, inputs {shape}"
    return "\n".join([head, *lines, f"partition {partition_hash(dataset, clients)}"])


def class_counts(dataset: Dataset, clients: list[ClientRows]) -> np.ndarray:
    """Return the number of rows that each client trains on or validates with, by class; int64 [clients, classes]."""
    labels = [dataset.labels[np.concatenate([client.train, client.val])] for client in clients]
    return np.stack([np.bincount(values, minlength=dataset.num_classes) for values in labels])


def _server_row(domain: str, labels: np.ndarray, split: str) -> tuple[str, ...]:
    return ("server", domain, "", "", f"{len(labels):,}", f"{_classes(labels)} ({split})")


def _classes(labels: np.ndarray) -> str:
    """Return up to ten classes as "0 3 7"; of more, only the number."""
    present = np.unique(labels)
    return " ".join(map(str, present)) if len(present) <= 10 else f"{len(present)} classes"
