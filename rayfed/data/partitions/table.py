"""A partition as a table, a row per example that a client holds: what `partition.name=file` reads."""

import hashlib
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from rayfed.core.errors import UsageError
from rayfed.data.dataset import ClientRows, Dataset

SPLITS = ("train", "val", "test")


def save(dataset: Dataset, parts: list[ClientRows], path: str | Path) -> None:
    """Writes client, split, source, index and domain of every row held, in the order in which clients hold them.

    Raises:
        UsageError: two rows of the dataset have the same origin, or `path` cannot be written.
    """
    rows, client, split = _columns(parts)
    origins = np.stack([dataset.source[rows], dataset.index[rows]])
    if np.unique(origins, axis=1).shape[1] < len(rows):
        raise UsageError(f"{path}: rows of {dataset.name} have the same source and index, so no file can name them")
    names = np.array([client_domain(dataset, part) for part in parts], object)
    columns = {
        "client": client,
        "split": pa.DictionaryArray.from_arrays(pa.array(split), list(SPLITS)).cast(pa.string()),
        "source": pa.DictionaryArray.from_arrays(pa.array(origins[0]), list(dataset.sources)).cast(pa.string()),
        "index": origins[1],
        "domain": pa.array(names[client], pa.string()),
    }
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        parquet.write_table(pa.table(columns), path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror or error})") from error


def partition_hash(dataset: Dataset, parts: list[ClientRows]) -> str:
    """Twelve hex digits of who holds what: client, split, source and index of every row, in no particular order.

    It is the same for a partition and for its file, on any machine. It names rows and does not look into them: what an
    example is, and which test sets nobody holds, is for the options of the dataset to say.
    """
    rows, client, split = _columns(parts)
    source, index = dataset.source[rows].astype("<i8"), dataset.index[rows].astype("<i8")
    order = np.lexsort((index, source, split, client))
    found = hashlib.blake2b("|".join(dataset.sources).encode(), digest_size=6)
    for column in (client, split, source, index):
        found.update(np.ascontiguousarray(column[order].astype("<i8")).data)
    return found.hexdigest()


def _columns(parts: list[ClientRows]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The rows that clients hold, and the number of the client and of the split of each."""
    pieces = [rows for part in parts for rows in part[2:]]
    sizes = [len(rows) for rows in pieces]
    rows = np.concatenate(pieces).astype(np.int64)
    client = np.repeat(np.repeat([part.id for part in parts], len(SPLITS)), sizes)
    return rows, client, np.repeat(np.tile(np.arange(len(SPLITS)), len(parts)), sizes)


def client_domain(dataset: Dataset, part: ClientRows) -> str:
    """The domain of a client: the dataset's word, where it makes clients differ, else the partition's."""
    return dataset.client_view.domain(part.id) if dataset.client_view else part.domain
