"""A partition in words, and a contact sheet of a dataset."""

from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.paths import writing
from rayfed.data.dataset import ClientRows, Dataset, index_within_group, unheld_rows
from rayfed.data.partitions.base import describe_validation, partition_hash

MAX_CLIENTS = 60  # clients listed in a table; the others are only counted


def describe(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a text table of each client's domain, numbers of training, validation and test samples, and classes."""
    rows: list[tuple[str, ...]] = [("client", "domain", "train", "val", "test", "classes")]
    for client in clients[:MAX_CLIENTS]:
        sizes = [f"{len(part):,}" for part in client[2:]]
        rows.append((str(client.id), dataset.client_domain(client), *sizes, _classes(dataset.labels[client.train])))
    if len(clients) > MAX_CLIENTS:
        rows.append(("…", f"{len(clients) - MAX_CLIENTS} more", "", "", "", ""))
    totals = [sum(map(len, column)) for column in zip(*(client[2:] for client in clients), strict=True)]
    rows.append(("all", "", *(f"{total:,}" for total in totals), str(dataset.num_classes) * dataset.has_classes))
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
    shape = str(dataset.layout or " x ".join(map(str, dataset.images.shape[1:])))
    plural = "s" * (len(clients) > 1)
    classes = f"{dataset.num_classes} classes" if dataset.has_classes else f"labels {_classes(dataset.labels)}"
    head = f"{dataset.name}: {len(clients)} client{plural}, {classes}, inputs {shape}"
    validated = describe_validation(dataset, clients)
    head += f", {validated}" if validated else ""
    return "\n".join([head, *lines, f"partition {partition_hash(dataset, clients)}"])


def class_counts(dataset: Dataset, clients: list[ClientRows]) -> np.ndarray:
    """Return the number of rows that each client trains on or validates with, by class; int64 [clients, classes].

    Other labels are one class.
    """
    classes = dataset.labels if dataset.has_classes else np.zeros(len(dataset), np.int64)
    labels = [classes[np.concatenate([client.train, client.val])] for client in clients]
    return np.stack([np.bincount(values, minlength=dataset.num_classes) for values in labels])


def _server_row(domain: str, labels: np.ndarray, split: str) -> tuple[str, ...]:
    return ("server", domain, "", "", f"{len(labels):,}", f"{_classes(labels)} ({split})")


def _classes(labels: np.ndarray) -> str:
    """Return up to ten classes as "0 3 7"; of more, only the number, and of other labels their form."""
    if labels.ndim > 1 or labels.dtype.kind == "f":
        return f"{labels.dtype} {list(labels.shape)}"
    present = np.unique(labels)
    return " ".join(map(str, present)) if len(present) <= 10 else f"{len(present)} classes"


def save_contact_sheet(dataset: Dataset, path: str | Path, *, columns: int = 16, scale: int = 2) -> None:
    """Write a PNG with one row of `columns` examples per domain, in which the classes take turns.

    A pixel of an image becomes `scale` x `scale` pixels. UsageError if images are not uint8 [N, 1 or 3, height, width].
    """
    if dataset.images.dtype != np.uint8 or dataset.images.ndim != 4 or dataset.images.shape[1] not in (1, 3):
        actual = dataset.layout or f"{dataset.images.dtype} {list(dataset.images.shape)}"
        raise UsageError(f"contact sheet: {dataset.name} has {actual}; expected uint8 [N, 1 or 3, height, width]")
    import torch  # imported late: takes a second or more
    from torchvision.utils import make_grid

    sheet = []
    for position in range(len(dataset.domains)):
        rows = np.flatnonzero(dataset.domain == position)
        labels = dataset.labels[rows] if dataset.has_classes else np.zeros(len(rows))
        rows = rows[np.lexsort((labels, index_within_group(labels)))][:columns]
        images = torch.from_numpy(dataset.images[rows]).repeat_interleave(scale, 2).repeat_interleave(scale, 3)
        sheet += [*images, *[torch.full_like(images[0], 255)] * (columns - len(rows))]
    grid = make_grid(torch.stack(sheet), nrow=columns, pad_value=255)
    with writing(path):
        Image.fromarray(grid.permute(1, 2, 0).numpy()).save(path, "png", optimize=True)
