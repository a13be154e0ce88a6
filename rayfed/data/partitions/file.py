"""A partition as a Parquet file, which identifies every example by source and index."""

from collections.abc import Sequence
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
from rayfed.data.readers.tables import check_columns, plain
from rayfed.data.splits import split_masks

if TYPE_CHECKING:
    import pandas  # imported late by pyarrow: takes a second

COLUMNS = ("client", "split", "source", "index")
_NUMBERS = ("client", "index")


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

    def __post_init__(self) -> None:
        if self.redraw:
            raise UsageError(
                f"partition.redraw=true: {self.file} is one split for all seeds; leave redraw out, or choose another "
                "partition"
            )

    def draws_tests(self, dataset: Dataset) -> bool | None:
        return False

    def split(self, dataset: Dataset) -> list[ClientRows]:
        table = self._read()
        rows = self._rows(table, dataset)
        client = table["client"].to_numpy()
        where = f"partition.file={self.file}: column 'split'"
        is_test, is_val = split_masks(where, table["split"])
        is_train = ~is_test & ~is_val
        validated = self._validated(dataset, rows[is_train])
        strata = self.strata(dataset)
        clients = []
        for number, file_number in enumerate(np.unique(client)):
            is_own = client == file_number
            train = rows[is_own & is_train]
            val = rows[is_own & is_val]
            test = rows[is_own & is_test]
            if "domain" in table:
                first = np.argmax(is_own)
                domain = printable(str(table["domain"].to_numpy()[first]))
            else:
                domain = dataset.domain_of(np.concatenate([train, val, test]))
            if is_val.any() or self.validation == 0:
                clients.append(ClientRows(number, domain, train, val, test))
            else:
                clients.append(self.client_rows(number, domain, train, test, validated, strata))
        return clients

    def _validated(self, dataset: Dataset, train: np.ndarray) -> np.ndarray | None:
        """Return a mask, bool [N], of the dataset's own validation examples; None if none is among `train`."""
        validated = self.given_validation(dataset)
        if validated is not None and validated[train].any():
            return validated
        return None

    def _read(self) -> "pandas.DataFrame":
        """Return the table of the file; the columns client and index are integers."""
        where = f"partition.file={self.file}"
        path = existing("partition.file", self.file, f"expected a Parquet file of {', '.join(COLUMNS)}")
        check_columns(path, COLUMNS)
        with readable(where, "a Parquet file"):
            stored = parquet.read_table(path)
            stored.validate(full=True)  # strings would otherwise be decoded later, one by one
        if not stored.num_rows:
            raise UsageError(f"{where}: has no rows; expected one for each example")
        for name in COLUMNS:
            kind = plain(stored.schema.field(name).type)
            empty = stored[name].null_count
            if name in _NUMBERS:
                fits = pa.types.is_integer(kind)
                expected = "integers from 0"
            else:
                fits = pa.types.is_string(kind)
                expected = "text"
            if not fits or empty:
                found = str(kind)
                if empty:
                    found += f", with {empty} empty cells"
                raise UsageError(f"{where}: column {name!r} is {found}; expected {expected} and no empty cells")
        # pandas' own metadata is not needed and could be damaged too.
        table = stored.replace_schema_metadata(None).to_pandas()
        lowest = table["client"].min()
        if lowest < 0:
            found = f"{table['client'].dtype} from {lowest}"
            raise UsageError(f"{where}: column 'client' is {found}; expected integers from 0 and no empty cells")
        return table

    def _rows(self, table: "pandas.DataFrame", dataset: Dataset) -> np.ndarray:
        """Return the row of the dataset that each row of the table identifies."""
        import pandas  # imported late: takes a second

        allowed = dataset.rows()
        names = np.array(dataset.sources)[dataset.source[allowed]]
        known = pandas.MultiIndex.from_arrays([names, dataset.index[allowed]])
        wanted = table[["source", "index"]]
        places = known.get_indexer(pandas.MultiIndex.from_frame(wanted))
        missing = np.flatnonzero(places < 0)
        if len(missing):
            source, index = wanted.iloc[missing[0]]
            expected = (
                f"the {len(allowed)} examples of {', '.join(dataset.sources)} that clients of {dataset.name} may hold"
            )
            raise UsageError(f"partition.file={self.file}: index {index} of source {source!r} is not among {expected}")
        return allowed[places]


def save(dataset: Dataset, clients: list[ClientRows], path: str | Path) -> None:
    """Write client, split, source, index and domain of every row that a client holds, in the clients' order.

    Raises:
        UsageError: Two rows of the dataset have the same source and index, or `path` cannot be written.
    """
    rows, client, split = columns_of(clients)
    source = dataset.source[rows]
    index = dataset.index[rows]
    origins = np.unique(np.stack([source, index]), axis=1)
    if origins.shape[1] < len(rows):
        raise UsageError(f"{path}: rows of {dataset.name} have the same source and index, so no file can name them")
    domains = np.array([dataset.client_domain(held) for held in clients], object)
    columns = {
        "client": client,
        "split": _named(split, SPLITS),
        "source": _named(source, dataset.sources),
        "index": index,
        "domain": pa.array(domains[client], pa.string()),
    }
    with writing(path):
        parquet.write_table(pa.table(columns), path)


def _named(positions: np.ndarray, names: Sequence[str]) -> pa.Array:
    """Return the column of the names at `positions`."""
    codes = pa.array(positions)
    return pa.DictionaryArray.from_arrays(codes, list(names)).cast(pa.string())
