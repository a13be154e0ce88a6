"""The user's modules in other processes, which may be on machines without the files.

What is pickled carries the user's functions and classes by value. A trial of a sweep is given a configuration instead,
which names classes as module:Name, so it imports the modules from their sources.
"""

import dataclasses
import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Sequence

import ray

from rayfed.experiments.user_code import ModuleSource, loaded_user_modules


def register_user_modules() -> None:
    """Let Ray pickle the functions and classes of all loaded user modules by value, in this process."""
    for module in loaded_user_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def without_caches(sources: Iterable[ModuleSource]) -> list[ModuleSource]:
    """Return `sources` without the syntax trees that they hold once they were hashed."""
    return [dataclasses.replace(source) for source in sources]


def install(sources: Iterable[ModuleSource]) -> None:
    """Let this process import modules from `sources`, whatever files are here."""
    sys.meta_path.insert(0, _SourceFinder(sources))


class _SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, sources: Iterable[ModuleSource]) -> None:
        self._sources = {source.name: source for source in sources}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if (source := self._sources.get(fullname)) is None:
            return None
        spec = importlib.machinery.ModuleSpec(fullname, self, origin=source.file, is_package=source.is_package)
        spec.has_location = True
        if source.is_package:
            spec.submodule_search_locations = [os.path.dirname(source.file)]
        return spec

    def get_source(self, fullname: str) -> str:
        return self._sources[fullname].text

    def get_code(self, fullname: str) -> types.CodeType:
        source = self._sources[fullname]
        return self.source_to_code(source.text, source.file)

    def is_package(self, fullname: str) -> bool:
        return self._sources[fullname].is_package
