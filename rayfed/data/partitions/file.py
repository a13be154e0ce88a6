"""A published partition, read from a Parquet file that names every example by its origin."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas
import pyarrow
from pyarrow import parquet

from rayfed.core.errors import UsageError
from rayfed.core.options import option
from rayfed.data.dataset import Dataset, Part
from rayfed.data.partition import Partition
from rayfed.data.partitions.table import SPLITS

COLUMNS = ("client", "split", "source", "index")


@dataclass(frozen=True, kw_only=True)
class File(Partition):
    """The partition that a Parquet file states, a row per example: client, split, source and index.

    `split` is train, val or test; without any val row, the validation share is drawn from each training part. `source`
    and `index` name the example as the dataset does (MNIST: train or t10k, and the row in that IDX file). Clients are
    numbered anew from 0 in the order of their numbers in the file. A further column `domain`, where it is there, says
    the domain of each client. `rayfed partition … --save FILE` writes such a file for any partition.
    """

    file: str = option(help="the Parquet file")

    def split(self, dataset: Dataset) -> list[Part]:
        table = self._read()
        rows = self._rows(table, dataset)
        client, split = table["client"].to_numpy(), table["split"].to_numpy()
        has_val = bool((split == "val").any())
        parts = []
        for number, original in enumerate(np.unique(client)):
            train, val, test = (rows[(client == original) & (split == name)] for name in SPLITS)
            if not len(train):
                raise UsageError(f"partition.file={self.file}: client {original} has no row with split=train")
            if "domain" in table:
                domain = str(table["domain"].to_numpy()[np.argmax(client == original)])
            else:
                domain = dataset.domain_of(np.concatenate([train, val, test]))
            as_it_is = has_val or not self.validation
            parts.append(Part(number, domain, train, val, test) if as_it_is else self.part(number, domain, train, test))
        return parts

    def _read(self) -> pandas.DataFrame:
        path = Path(self.file).expanduser()
        if not path.is_file():
            needed = ", ".join(COLUMNS)
            raise UsageError(f"partition.file={self.file}: no such file; expected a Parquet file of {needed}")
        try:
            stored = parquet.read_table(path)
            stored.validate(full=True)  # texts are otherwise decoded late, one by one
            # Without what pandas adds to the file about itself: it is not needed, and can be damaged too.
            table = stored.to_pandas(ignore_metadata=True)
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            raise UsageError(f"partition.file={self.file}: cut short, damaged or no Parquet file ({reason})") from error
        missing = [name for name in COLUMNS if name not in table]
        if missing:
            found, needed = ", ".join(map(str, table.columns)), ", ".join(COLUMNS)
            raise UsageError(f"partition.file={self.file}: no column {missing[0]!r} (found: {found}); needs {needed}")
        for name in COLUMNS:
            if table[name].isna().any():
                raise UsageError(f"partition.file={self.file}: column {name!r} has empty cells")
        for name in ("client", "index"):
            if not pandas.api.types.is_integer_dtype(table[name]):
                kind = table[name].dtype
                raise UsageError(f"partition.file={self.file}: column {name!r} is {kind}; expected whole numbers")
        unknown = sorted(set(table["split"].unique()) - set(SPLITS), key=str)
        if unknown:
            raise UsageError(f"partition.file={self.file}: split {unknown[0]!r}; expected {', '.join(SPLITS)}")
        if not len(table):
            raise UsageError(f"partition.file={self.file}: has no rows; expected one per example")
        return table

    def _rows(self, table: pandas.DataFrame, dataset: Dataset) -> np.ndarray:
        """The row of the dataset that each row of the table names."""
        unknown = sorted(set(table["source"].unique()) - set(dataset.sources), key=str)
        if unknown:
            known = ", ".join(dataset.sources)
            raise UsageError(f"partition.file={self.file}: source {unknown[0]!r}; {dataset.name} has {known}")
        source = table["source"].map({name: code for code, name in enumerate(dataset.sources)}).to_numpy(dtype=int)
        index = table["index"].to_numpy(dtype=int)
        size = int(dataset.index.max()) + 1
        place = np.full((len(dataset.sources), size), -1)
        held = dataset.rows()
        place[dataset.source[held], dataset.index[held]] = held
        rows = np.where((index >= 0) & (index < size), place[source, index.clip(0, size - 1)], -1)
        if (rows < 0).any():
            first = int(np.argmax(rows < 0))
            known = dataset.index[held][dataset.source[held] == source[first]]
            span = f"{len(known)} of them, {known.min()}..{known.max()}" if len(known) else "none"
            raise UsageError(
                f"partition.file={self.file}: index {index[first]} of source {dataset.sources[source[first]]!r} "
                f"is not among those that clients of {dataset.name} may hold ({span})"
            )
        repeated = table.duplicated(["source", "index"]).to_numpy()
        if repeated.any():
            first = int(np.argmax(repeated))
            raise UsageError(
                f"partition.file={self.file}: index {index[first]} of source {dataset.sources[source[first]]!r} "
                f"is given twice ({int(repeated.sum())} repeated rows); expected each example once"
            )
        return rows
