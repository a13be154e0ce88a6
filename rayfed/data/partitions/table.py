"""A partition as a table with one row per example that a client holds, as `partition.name=file` reads it."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from rayfed.core.errors import UsageError
from rayfed.core.file_names import writing
from rayfed.data.dataset import ClientRows, Dataset

SPLITS = ("train", "val", "test")


def save(dataset: Dataset, clients: list[ClientRows], path: str | Path) -> None:
    """Write client, split, source, index and domain of every row that a client holds, in the clients' order.

    Raises:
        UsageError: Two rows of the dataset have the same source and index, or `path` cannot be written.
    """
    rows, client, split = _columns(clients)
    origins = np.stack([dataset.source[rows], dataset.index[rows]])
    if np.unique(origins, axis=1).shape[1] < len(rows):
        raise UsageError(f"{path}: rows of {dataset.name} have the same source and index, so no file can name them")
    names = np.array([client_domain(dataset, client) for client in clients], object)
    columns = {
        "client": client,
        "split": pa.DictionaryArray.from_arrays(pa.array(split), list(SPLITS)).cast(pa.string()),
        "source": pa.DictionaryArray.from_arrays(pa.array(origins[0]), list(dataset.sources)).cast(pa.string()),
        "index": origins[1],
        "domain": pa.array(names[client], pa.string()),
    }
    with writing(path):
        parquet.write_table(pa.table(columns), path)


def partition_hash(dataset: Dataset, clients: list[ClientRows]) -> str:
    """Return a hash of client, split, source and index of all rows, regardless of their order; 12 hexadecimal digits.

    It is the same for a partition and for its file, on every machine. It does not depend on the contents of the rows
    nor on test sets that no client holds: these follow from the options of the dataset.
    """
    rows, client, split = _columns(clients)
    source, index = dataset.source[rows].astype("<i8"), dataset.index[rows].astype("<i8")
    order = np.lexsort((index, source, split, client))
    digest = hashlib.blake2b("|".join(dataset.sources).encode(), digest_size=6)
    for column in (client, split, source, index):
        digest.update(np.ascontiguousarray(column[order].astype("<i8")).data)
    return digest.hexdigest()


def _columns(clients: list[ClientRows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows that clients hold, and for each row the numbers of its client and split."""
    pieces = [rows for client in clients for rows in client[2:]]
    sizes = [len(rows) for rows in pieces]
    rows = np.concatenate(pieces).astype(np.int64)
    numbers = np.repeat(np.repeat([client.id for client in clients], len(SPLITS)), sizes)
    return rows, numbers, np.repeat(np.tile(np.arange(len(SPLITS)), len(clients)), sizes)


def client_domain(dataset: Dataset, client: ClientRows) -> str:
    """Return the domain of a client: from the dataset's client view if it has one, else from the partition."""
    return dataset.client_view.domain(client.id) if dataset.client_view else client.domain
