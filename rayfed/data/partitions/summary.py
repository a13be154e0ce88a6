"""A divided dataset in words, and a population as one hash."""

import numpy as np

from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.leakage_groups import unheld_rows
from rayfed.data.partitions.table import client_domain, partition_hash

ROWS = 60  # clients shown in a table; the rest are counted
BLOCK = 1024  # examples that are hashed at once


def describe(dataset: Dataset, parts: list[ClientRows]) -> str:
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
        rows.append(_server(name, dataset.labels[unheld_rows(dataset, parts, name)], "ood"))
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
