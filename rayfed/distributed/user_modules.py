"""The user's modules and paths in other processes, which may be on machines without the files.

Pickles carry the user's functions and classes by value. The configuration of a trial of a sweep names classes as
module:Name instead, so its process imports the modules from their sources.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import ray

from rayfed.core.errors import is_user_module
from rayfed.core.paths import enter, working_folder
from rayfed.core.registry import ModuleSource
from rayfed.data.readers.files import datasets_folder


class SentFiles(NamedTuple):
    """The working directory of the command, its folder of datasets, and the user's modules."""

    folder: Path
    datasets: Path
    modules: tuple[ModuleSource, ...]


def register_user_modules() -> None:
    """Let Ray pickle the functions and classes of all loaded user modules by value, in this process."""
    for name, module in list(sys.modules.items()):
        if name != "__main__" and getattr(module, "__name__", None) == name and is_user_module(name):
            ray.cloudpickle.register_pickle_by_value(module)


def to_send(sources: Iterable[ModuleSource]) -> SentFiles:
    """Return `sources` for other processes, with the folders of this process."""
    return SentFiles(working_folder(), datasets_folder(None), tuple(sources))


def install(files: SentFiles | None) -> None:
    """Let paths and modules mean in this process what they mean in the process of the command.

    A machine without the command's folder of datasets uses its own.
    """
    if files is None:
        return
    enter(files.folder)
    if files.datasets.is_dir():
        os.environ["RAYFED_DATA"] = str(files.datasets)
    if files.modules:
        sys.meta_path.insert(0, _SourceFinder(files.modules))


class _SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):  # type: ignore[misc]
    def __init__(self, modules: Iterable[ModuleSource]) -> None:
        self._sources = {module.name: module for module in modules}
        self._texts = {module.file: module.text for module in modules}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        source = self._sources.get(fullname)
        if source is None:
            return None
        return importlib.util.spec_from_file_location(fullname, source.file, loader=self)

    def get_filename(self, fullname: str) -> str:
        return self._sources[fullname].file

    def get_data(self, path: str) -> bytes:
        return self._texts[path].encode()
