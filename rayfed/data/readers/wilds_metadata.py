"""Reader for metadata.csv, the table of the images of a WILDS dataset."""

from collections.abc import Sequence
from pathlib import Path

import pandas

from rayfed.core.errors import UsageError


def read_metadata(path: Path, integers: Sequence[str], strings: Sequence[str], url: str) -> pandas.DataFrame:
    """Read some columns of a CSV file with a header.

    Args:
        path: The file.
        integers: Columns of non-negative integers.
        strings: Columns of non-empty strings.
        url: Where to get the file, for the error message.

    Raises:
        UsageError: The file is missing, empty or damaged, or lacks a column or a value.
    """
    needed = [*integers, *strings]
    if not path.is_file():
        raise UsageError(f"{path}: no such file; expected a table with the columns {', '.join(needed)}; from {url}")
    try:
        table = pandas.read_csv(path, dtype=str, keep_default_na=False)
    except (ValueError, OSError) as error:  # pandas' own errors are ValueErrors
        reason = " ".join(str(error).split())
        raise UsageError(f"{path}: empty, damaged or not a CSV file ({reason}); download it again") from error
    missing = [name for name in needed if name not in table]
    if missing:
        present = ", ".join(map(str, table.columns))
        raise UsageError(f"{path}: no column {missing[0]!r} (found: {present}); needs {', '.join(needed)}")
    if not len(table):
        raise UsageError(f"{path}: has no rows; expected one per image")
    for name in needed:
        valid = table[name].str.fullmatch(r"\d+") if name in integers else table[name] != ""
        if not valid.all():
            row = int((~valid).to_numpy().argmax())
            kind = "an integer" if name in integers else "a string"
            raise UsageError(f"{path}, line {row + 2}: {name} is {table[name][row]!r}; expected {kind}")
    return table[needed].astype(dict.fromkeys(integers, int))
