"""A partition as a Parquet file, which identifies every example by source and index."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from rayfed.core.errors import UsageError, printable
from rayfed.core.options import option
from rayfed.core.paths import writing
from rayfed.data.dataset import ClientRows, Dataset
from rayfed.data.partitions.base import Partition, columns_of
from rayfed.data.population import SPLITS
from rayfed.data.readers.files import existing, readable
from rayfed.data.readers.tables import check_columns
from rayfed.data.splits import split_masks

if TYPE_CHECKING:
    import pandas  # imported late by pyarrow: takes a second

COLUMNS = ("client", "split", "source", "index")


@dataclass(frozen=True, kw_only=True)
class File(Partition):
    """The partition in a Parquet file with one row per example and the columns client, split, source and index.

    `split` is train, val or test, or another spelling of these. If there is no val row, the training rows that are
    validation examples of the dataset are for validation; without such rows, a share of each training part is drawn.
    `source` and `index` identify the example as in the dataset (MNIST: train or t10k, and the row in that IDX file).
    Clients are renumbered from 0 in the order of their numbers in the file. An optional column `domain` gives the
    domain of each client. `rayfed partition … --save FILE` writes such a file for any partition.
    """

    follows_seed: ClassVar[bool] = False

    file: str = option(help="path of the Parquet file")

    def split(self, dataset: Dataset) -> list[ClientRows]:
        table = self._read()
        rows = self._rows(table, dataset)
        client = table["client"].to_numpy()
        is_test, is_val = split_masks(f"partition.file={self.file}: column 'split'", table["split"])
        has_val = bool(is_val.any())
        masks = {"train": ~is_test & ~is_val, "val": is_val, "test": is_test}
        validated = self._validated(dataset, rows[masks["train"]])
        clients = []
        for number, file_number in enumerate(np.unique(client)):
            train, val, test = (rows[(client == file_number) & masks[name]] for name in SPLITS)
            if "domain" in table:
                domain = printable(str(table["domain"].to_numpy()[np.argmax(client == file_number)]))
            else:
                domain = dataset.domain_of(np.concatenate([train, val, test]))
            if has_val or self.validation == 0:
                clients.append(ClientRows(number, domain, train, val, test))
            else:
                clients.append(self.client_rows(number, domain, train, test, validated))
        return clients

    def _validated(self, dataset: Dataset, train: np.ndarray) -> np.ndarray | None:
        """Return a mask, bool [N], of the dataset's own validation examples; None if none is among `train`."""
        validated = self.given_validation(dataset)
        return None if validated is None or not validated[train].any() else validated

    def _read(self) -> "pandas.DataFrame":
        where = f"partition.file={self.file}"
        path = existing("partition.file", self.file, f"expected a Parquet file of {', '.join(COLUMNS)}")
        check_columns(path, COLUMNS)
        with readable(where, "a Parquet file"):
            stored = parquet.read_table(path)
            stored.validate(full=True)  # strings would otherwise be decoded later, one by one
            # pandas' own metadata is not needed and could be damaged too.
            table = stored.to_pandas(ignore_metadata=True)
        for name in ("client", "index"):
            if table[name].dtype.kind not in "iu" or (name == "client" and (table[name] < 0).any()):
                found = f"{table[name].dtype} from {table[name].min()}"
                raise UsageError(f"{where}: column {name!r} is {found}; expected integers from 0 and no empty cells")
        return table

    def _rows(self, table: "pandas.DataFrame", dataset: Dataset) -> np.ndarray:
        """Return the row of the dataset that each row of the table identifies."""
        import pandas  # imported late: takes a second

        allowed = dataset.rows()
        names = np.array(dataset.sources)[dataset.source[allowed]]
        known = pandas.MultiIndex.from_arrays([names, dataset.index[allowed]])
        places = known.get_indexer(pandas.MultiIndex.from_frame(table[["source", "index"]]))
        if len(missing := np.flatnonzero(places < 0)):
            source, index = table[["source", "index"]].iloc[missing[0]]
            raise UsageError(
                f"partition.file={self.file}: index {index} of source {source!r} is not among the {len(allowed)} "
                f"examples of {', '.join(dataset.sources)} that clients of {dataset.name} may hold"
            )
        return allowed[places]


def save(dataset: Dataset, clients: list[ClientRows], path: str | Path) -> None:
    """Write client, split, source, index and domain of every row that a client holds, in the clients' order.

    Raises:
        UsageError: Two rows of the dataset have the same source and index, or `path` cannot be written.
    """
    rows, client, split = columns_of(clients)
    origins = np.stack([dataset.source[rows], dataset.index[rows]])
    if np.unique(origins, axis=1).shape[1] < len(rows):
        raise UsageError(f"{path}: rows of {dataset.name} have the same source and index, so no file can name them")
    names = np.array([dataset.client_domain(client) for client in clients], object)
    columns = {
        "client": client,
        "split": pa.DictionaryArray.from_arrays(pa.array(split), list(SPLITS)).cast(pa.string()),
        "source": pa.DictionaryArray.from_arrays(pa.array(origins[0]), list(dataset.sources)).cast(pa.string()),
        "index": origins[1],
        "domain": pa.array(names[client], pa.string()),
    }
    with writing(path):
        parquet.write_table(pa.table(columns), path)
