"""The folders that ship with the package: `tune_spaces` (search spaces) and `docs`.

A wheel has them inside the package. A checkout, and an editable installation of one, has them beside it.
"""

from pathlib import Path

from rayfed.core.errors import UsageError

_PACKAGE = Path(__file__).parents[1]


def packaged_folder(name: str) -> Path:
    """Return the folder `name`.

    Raises:
        UsageError: This copy of rayfed has no such folder.
    """
    for parent in (_PACKAGE, _PACKAGE.parent):
        if (parent / name).is_dir():
            return parent / name
    raise UsageError(f"{name}: not found in {_PACKAGE} or beside it; install rayfed from a wheel or a full checkout")


def packaged_spaces() -> dict[str, Path]:
    """Return the file of every packaged search space by its name."""
    return {path.stem: path for path in sorted(packaged_folder("tune_spaces").glob("*.yaml"))}
