"""The folders that ship with the package: `tune_spaces` (search spaces) and `docs`.

A wheel has them inside the package. A checkout, and an editable installation of one, has them beside it.
"""

from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def packaged_folder(name: str) -> Path:
    """Return the folder `name`.

    Raises:
        UsageError: This copy of rayfed has no such folder.
    """
    return next(parent / name for parent in (_PACKAGE, _PACKAGE.parent) if (parent / name).is_dir())


def packaged_spaces() -> dict[str, Path]:
    """Return the file of every packaged search space by its name."""
    return {path.stem: path for path in sorted(packaged_folder("tune_spaces").glob("*.yaml"))}
