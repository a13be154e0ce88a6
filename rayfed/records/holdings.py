"""Which client holds how many examples of which class: a small Parquet file per partition, for plots of it.

The file is `<experiment>/partitions/<partition_hash>.parquet`, with the columns of `SCHEMA`. Trials with the same
partition share it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from rayfed.records.files import read_parquet, replace_parquet
from rayfed.records.storage import Storage

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = pa.schema(
    [
        ("client", pa.int32()),
        ("domain", pa.string()),
        ("split", pa.string()),
        ("label", pa.int32()),
        ("count", pa.int64()),
    ]
)
FOLDER = "partitions"

Holding = tuple[int, str, str, int, int]
"""A client, its domain, a split, a class, and the number of its examples."""


def write_holdings(home: Storage, digest: str, holdings: Iterable[Holding]) -> None:
    """Write the partition with the hash `digest` to the folder of an experiment, unless it is there."""
    folder, name = home.child(FOLDER), f"{digest}.parquet"
    if name in folder.files():
        return
    columns = list(zip(*holdings, strict=True)) or [()] * len(SCHEMA)
    table = pa.table([pa.array(column, kind) for column, kind in zip(columns, SCHEMA.types, strict=True)], SCHEMA.names)
    replace_parquet(table, folder, name)


def read_holdings(home: Storage, digest: str) -> "pd.DataFrame | None":
    """Return the partition with the hash `digest`; None if it was not recorded."""
    try:
        return read_parquet(home.child(FOLDER), f"{digest}.parquet").to_pandas()
    except FileNotFoundError:
        return None
