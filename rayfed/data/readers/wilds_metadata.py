"""The table metadata.csv that lists the images of a WILDS dataset."""

from collections.abc import Sequence
from pathlib import Path

import pandas

from rayfed.core.errors import UsageError


def read_metadata(path: Path, numbers: Sequence[str], texts: Sequence[str], url: str) -> pandas.DataFrame:
    """The columns `numbers`, whole numbers from 0, and `texts` of a CSV file with a header.

    Raises:
        UsageError: a file that is missing, empty, damaged, or lacks a column or a value.
    """
    needed = [*numbers, *texts]
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected a table with the columns {', '.join(needed)}; from {url}")
    try:
        table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:  # pandas' own errors are ValueErrors
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: empty, damaged or no CSV file ({reason}); fetch it again") from error
    missing = [name for name in needed if name not in table]
    if missing:
        found = ", ".join(map(str, table.columns))
        raise UsageError(f"{path}: no column {missing[0]!r} (found: {found}); needs {', '.join(needed)}")
    if not len(table):
        raise UsageError(f"{path}: has no rows; expected one per image")
    for name in needed:
        right = table[name].str.fullmatch(r"\d+") if name in numbers else table[name] != ""
        if not right.all():
            row = int((~right).to_numpy().argmax())
            kind = "a whole number" if name in numbers else "a text"
            raise UsageError(f"{path}, line {row + 2}: {name} is {table[name][row]!r}; expected {kind}")
    return table[needed].astype(dict.fromkeys(numbers, int))
