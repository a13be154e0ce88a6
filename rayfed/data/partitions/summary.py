"""A partition in words, and a contact sheet of a dataset."""

from pathlib import Path

import numpy as np
from PIL import Image

from rayfed.core.errors import UsageError
from rayfed.core.paths import writing
from rayfed.core.words import counted, first_few
from rayfed.data.dataset import ClientRows, Dataset, index_within_group, unheld_rows
from rayfed.data.partitions.base import describe_validation, partition_hash

MAX_CLIENTS = 60  # clients listed in a table; the others are only counted
MAX_CLASSES = 10  # whose names are listed
_SCALE = 2  # pixels of a contact sheet for a pixel of an image, in each direction
Cells = tuple[str, ...]
"""A row of the table: client, domain, training, validation and test examples, classes."""


def describe(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a text table of each client's domain, numbers of training, validation and test examples, and classes."""
    rows: list[Cells] = [("client", "domain", "train", "val", "test", "classes")]
    rows += [_client_row(dataset, client) for client in clients[:MAX_CLIENTS]]
    if len(clients) > MAX_CLIENTS:
        more = f"{len(clients) - MAX_CLIENTS} more"
        rows.append(("…", more, "", "", "", ""))
    rows.append(_total_row(dataset, clients))
    for server_test in dataset.tests:
        rows.append(_server_row(server_test.domain, server_test.examples.y, server_test.split))
    for name in dataset.ood:
        labels = dataset.labels[unheld_rows(dataset, clients, name)]
        rows.append(_server_row(name, labels, "ood"))
    hash_line = f"partition {partition_hash(dataset, clients)}"
    return "\n".join([_heading(dataset, clients), *_aligned(rows), hash_line])


def _heading(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return the line above the table."""
    classes = f"labels {_classes(dataset.labels)}"
    if dataset.has_classes:
        classes = f"{dataset.num_classes} classes{_class_names(dataset)}"
    shape = " x ".join(map(str, dataset.images.shape[1:]))
    if dataset.layout is not None:
        shape = str(dataset.layout)
    parts = [f"{dataset.name}: {counted(len(clients), 'client')}", classes, f"inputs {shape}"]
    validated = describe_validation(dataset, clients)
    if validated:
        parts.append(validated)
    return ", ".join(parts)


def _class_names(dataset: Dataset) -> str:
    """Return " (0 healthy, 1 ill)" if the classes have names."""
    if dataset.class_names is None:
        return ""
    named = [f"{number} {name}" for number, name in enumerate(dataset.class_names)]
    return f" ({first_few(named, MAX_CLASSES)})"


def _aligned(rows: list[Cells]) -> list[str]:
    """Return a line for each row, with numbers on the right of their columns and words on the left."""
    columns = zip(*rows, strict=True)
    widths = []
    for column in columns:
        widths.append(max(map(len, column)))
    lines = []
    for row in rows:
        cells = []
        for position, (text, width) in enumerate(zip(row, widths, strict=True)):
            is_number = 2 <= position <= 4
            if is_number:
                cells.append(text.rjust(width))
            else:
                cells.append(text.ljust(width))
        lines.append("  ".join(cells).rstrip())
    return lines


def _client_row(dataset: Dataset, client: ClientRows) -> Cells:
    domain = dataset.client_domain(client)
    parts = (client.train, client.val, client.test)
    train, val, test = (f"{len(rows):,}" for rows in parts)
    classes = _classes(dataset.labels[client.train])
    return (str(client.id), domain, train, val, test, classes)


def _total_row(dataset: Dataset, clients: list[ClientRows]) -> Cells:
    train = val = test = 0
    for client in clients:
        train += len(client.train)
        val += len(client.val)
        test += len(client.test)
    classes = ""
    if dataset.has_classes:
        classes = str(dataset.num_classes)
    return ("all", "", f"{train:,}", f"{val:,}", f"{test:,}", classes)


def class_counts(dataset: Dataset, clients: list[ClientRows]) -> np.ndarray:
    """Return the number of rows that each client trains on or validates with, by class; int64 [clients, classes].

    Other labels are one class.
    """
    labels = np.zeros(len(dataset), np.int64)
    if dataset.has_classes:
        labels = dataset.labels
    counts = []
    for client in clients:
        fitted = labels[np.concatenate([client.train, client.val])]
        counts.append(np.bincount(fitted, minlength=dataset.num_classes))
    return np.stack(counts)


def _server_row(domain: str, labels: np.ndarray, split: str) -> Cells:
    classes = f"{_classes(labels)} ({split})"
    return ("server", domain, "", "", f"{len(labels):,}", classes)


def _classes(labels: np.ndarray) -> str:
    """Return up to ten classes as "0 3 7"; of more, only the number, and of other labels their form."""
    if labels.ndim > 1 or labels.dtype.kind == "f":
        return f"{labels.dtype} {list(labels.shape)}"
    present = np.unique(labels)
    if len(present) > 10:
        return f"{len(present)} classes"
    return " ".join(map(str, present))


def save_contact_sheet(dataset: Dataset, path: str | Path, *, columns: int = 16) -> None:
    """Write a PNG with one row of `columns` examples per domain, in which the classes take turns.

    A pixel of an image becomes 2 x 2 pixels.

    Raises:
        UsageError: Images are not uint8 [N, 1 or 3, height, width], or the file cannot be written.
    """
    images = dataset.images
    are_images = images.dtype == np.uint8 and images.ndim == 4
    if not are_images or images.shape[1] not in (1, 3):
        actual = dataset.layout or f"{images.dtype} {list(images.shape)}"
        raise UsageError(f"contact sheet: {dataset.name} has {actual}; expected uint8 [N, 1 or 3, height, width]")
    import torch  # imported late: takes a second or more
    from torchvision.utils import make_grid

    sheet: list[torch.Tensor] = []
    for position in range(len(dataset.domains)):
        shown = images[_in_turns(dataset, position)[:columns]]
        enlarged = torch.from_numpy(shown).repeat_interleave(_SCALE, 2).repeat_interleave(_SCALE, 3)
        white = torch.full_like(enlarged[0], 255)
        sheet += [*enlarged, *[white] * (columns - len(shown))]
    grid = make_grid(torch.stack(sheet), nrow=columns, pad_value=255)
    with writing(path):
        pixels = grid.permute(1, 2, 0).numpy()
        Image.fromarray(pixels).save(path, "png", optimize=True)


def _in_turns(dataset: Dataset, position: int) -> np.ndarray:
    """Return the rows of the domain at `position`; its classes take turns."""
    rows = np.flatnonzero(dataset.domain == position)
    labels = np.zeros(len(rows))
    if dataset.has_classes:
        labels = dataset.labels[rows]
    order = np.lexsort((labels, index_within_group(labels)))
    return rows[order]
