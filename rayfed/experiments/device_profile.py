"""The devices of clients in a file, for the simulated clock."""

import io
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rayfed.core.errors import UsageError, one_line, shown
from rayfed.core.paths import absolute, read_file
from rayfed.engine.clock import Device

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("client", "steps_per_second", "up_mbps", "down_mbps", "available")
_LEAST = 1e-9
"""The smallest speed and bandwidth of a profile, so that times are finite."""


def read_profile(path: str, ids: Sequence[int]) -> tuple[Device, ...]:
    """Return the devices of the clients with these `ids`, in their order, from a CSV or Parquet file.

    A row is that of the client in the column `client`, or else rows are in the order of the clients. Bandwidths may be
    missing. `available` is text, such as "0-3600 7200-9000", in seconds.

    Raises:
        UsageError: The file cannot be read, lacks a client, or has an impossible value.
    """
    where = f"clock.profile={path}"
    table = _rows_by_client(_profile_table(path, where), ids, where)
    speeds = _positive(table, "steps_per_second", where)
    missing = table.index[table["steps_per_second"].isna()].tolist()
    if missing:
        raise UsageError(f"{where}: steps_per_second of client {missing[0]} is nan; must be more than 0")
    up = _positive(table, "up_mbps", where)
    down = _positive(table, "down_mbps", where)
    devices = []
    for place, (client, text) in enumerate(table["available"].items()):
        available = _intervals(text, f"{where}: available of client {client}")
        devices.append(Device(1 / speeds[place], up[place], down[place], available))
    return tuple(devices)


def _profile_table(path: str, where: str) -> "pd.DataFrame":
    """Return the columns of a profile; cells are numbers, text or missing."""
    import pandas as pd  # takes most of a second, in which hosts would not start
    from pyarrow import parquet

    try:
        content = io.BytesIO(read_file(absolute(path)))
        if Path(path).suffix == ".csv":
            table = pd.read_csv(content)
        else:
            stored = parquet.read_table(content)
            stored.validate(full=True)
            table = stored.replace_schema_metadata(None).to_pandas()
    except Exception as error:  # pandas and pyarrow raise many kinds for damaged files
        raise UsageError(f"{where}: cannot be read as CSV or Parquet ({one_line(error)[:200]})") from error
    for name, column in table.items():
        if name not in _COLUMNS:
            raise UsageError(f"{where}: unknown column {name}; known: {', '.join(_COLUMNS)}")
        if not all(map(_is_plain, column)):
            raise UsageError(f"{where}: column {name} is {column.dtype}; expected numbers or text")
    if "steps_per_second" not in table:
        raise UsageError(f"{where}: has no column steps_per_second")
    return table


def _is_plain(cell: object) -> bool:
    return cell is None or isinstance(cell, (str, int, float))


def _rows_by_client(table: "pd.DataFrame", ids: Sequence[int], where: str) -> "pd.DataFrame":
    """Return all of `_COLUMNS` for the clients with these `ids`, by their ids."""
    if "client" not in table:
        if len(table) > len(ids):
            count = f"{len(table)} rows for {len(ids)} clients"
            raise UsageError(f"{where}: has {count}; name them in a column client")
        table = table.assign(client=list(ids)[: len(table)])
    named = table.set_index("client", drop=False)
    twice = named.index[named.index.duplicated()].tolist()
    if twice:
        raise UsageError(f"{where}: has several rows for client {twice[0]}")
    known = set(named.index)
    missing = [client for client in ids if client not in known]
    if missing:
        lacking = f"{missing[0]}, as for {len(missing)} of {len(ids)} clients"
        raise UsageError(f"{where}: has no row for client {lacking}")
    return named.reindex(columns=_COLUMNS).loc[list(ids)]


def _positive(table: "pd.DataFrame", name: str, where: str) -> list[float]:
    """Return a column of numbers above 0; infinity where they are missing."""
    import pandas as pd

    numbers = pd.to_numeric(table[name], errors="coerce")
    wrong = table[name].notna() & ~(numbers > 0)
    if wrong.any():
        client = wrong.idxmax()
        raise UsageError(f"{where}: {name} of client {client} is {table[name][client]}; must be more than 0")
    tiny = numbers < _LEAST
    if tiny.any():
        client = tiny.idxmax()
        raise UsageError(f"{where}: {name} of client {client} is {numbers[client]}; must be at least {_LEAST:g}")
    values: list[float] = numbers.fillna(math.inf).astype(float).tolist()
    return values


def _intervals(text: object, where: str) -> tuple[tuple[float, float], ...] | None:
    """Return the intervals of a text such as "0-3600 7200-9000"; None without a text."""
    if text is None or text != text:  # pandas reads an empty cell as NaN
        return None
    intervals = []
    try:
        for part in str(text).split():
            begin, end = map(float, part.split("-"))
            intervals.append((begin, end))
    except ValueError:
        intervals = []
    times = list(itertools.chain(*intervals))
    ascends = all(first < second for first, second in itertools.pairwise(times))
    if not times or times[0] < 0 or not ascends or not math.isfinite(times[-1]):
        raise UsageError(f"{where} is {shown(text)}; give ascending seconds, such as 0-3600 7200-9000")
    return tuple(intervals)
