"""Configuration given as arguments, YAML files and KEY=VALUE, and the files that ship with the package."""

import argparse
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rayfed.experiments.sources import from_arguments, from_file, merged


def add_values(parser: argparse.ArgumentParser, file: str, help: str) -> None:
    """Add the positional arguments `values`: any number of `file` and KEY=VALUE."""
    parser.add_argument("values", nargs="*", metavar=f"{file} | KEY=VALUE", help=help)


def files_of(values: Sequence[str]) -> list[str]:
    """Return the arguments that name files."""
    return [value for value in values if "=" not in value]


def pairs_of(values: Sequence[str]) -> dict[str, Any]:
    """Return the configuration given by the KEY=VALUE arguments, with dotted keys."""
    return from_arguments([value for value in values if "=" in value])


def read_values(values: Sequence[str]) -> list[Mapping[str, Any]]:
    """Return the content of the files in their order, then that of the KEY=VALUE arguments, which override it."""
    return [*map(from_file, files_of(values)), pairs_of(values)]


def start_ray_meanwhile(sources: Sequence[Mapping[str, Any]]) -> None:
    """Begin to start Ray, if the configuration has hosts, while torch is imported and the plan is made.

    A configuration that is then refused ends this process, and Ray with it.
    """
    placement = merged(*sources).get("placement")
    if not isinstance(placement, Mapping):
        return
    hosts = placement.get("hosts")
    if isinstance(hosts, int) and hosts > 0:
        with contextlib.suppress(ImportError):  # what needs Ray says so
            from rayfed.distributed.cluster import begin

            begin(dashboard=False)


def packaged_folder(name: str) -> Path:
    """Return the folder `name`, tune_spaces or docs, that ships with the package.

    A wheel has it inside the package. A checkout, and its editable installation, has it beside the package.
    """
    package = Path(__file__).parents[1]
    return next(parent / name for parent in (package, package.parent) if (parent / name).is_dir())


def packaged_spaces() -> dict[str, Path]:
    """Return the file of every packaged search space by its name."""
    return {path.stem: path for path in sorted(packaged_folder("tune_spaces").glob("*.yaml"))}
