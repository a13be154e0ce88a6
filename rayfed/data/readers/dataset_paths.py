"""Where the files of a dataset lie."""

import os
from collections.abc import Sequence
from pathlib import Path

from rayfed.core.errors import UsageError

ROOT_HELP = "folder of datasets; null: the environment variable RAYFED_DATA, else data"  # the help of an option `root`


def datasets_folder(root: str | None) -> Path:
    """The folder of datasets: `root`, else the environment variable RAYFED_DATA, else "data"."""
    return Path(root or os.environ.get("RAYFED_DATA") or "data").expanduser()


def find_dataset_folder(root: str | None, names: Sequence[str], *, expected: str, source: str) -> Path:
    """The first of the folders `names` that is there.

    Raises:
        UsageError: none is; the line says what was `expected` in it and from what `source` it comes.
    """
    folder = datasets_folder(root)
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
    raise UsageError(
        f"{folder / names[0]}{others}: no such folder; expected {expected}; from {source}; "
        "data.root is the folder that holds it"
    )
