"""The user's modules in other processes, which may be on machines without the files.

What is pickled carries the user's functions and classes by value. A trial of a sweep is given a configuration instead,
which names classes as module:Name, so it imports the modules from their sources.
"""

import importlib.abc
import importlib.machinery
import os
import sys
import types
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import ray

if TYPE_CHECKING:
    from rayfed.experiments.user_code import ModuleSource


class SentModule(NamedTuple):
    """A module of the user's own on its way to a process that may lack its file; see `ModuleSource`."""

    name: str
    file: str
    is_package: bool
    text: str


def register_user_modules() -> None:
    """Let Ray pickle the functions and classes of all loaded user modules by value, in this process."""
    from rayfed.experiments.user_code import loaded_user_modules  # not in the processes of hosts, which only install

    for module in loaded_user_modules():
        ray.cloudpickle.register_pickle_by_value(module)


def to_send(sources: "Iterable[ModuleSource]") -> tuple[SentModule, ...]:
    """Return `sources` as they are sent to other processes."""
    return tuple(SentModule(source.name, source.file, source.is_package, source.text) for source in sources)


def install(modules: Sequence[SentModule]) -> None:
    """Let this process import `modules`, whatever files are here."""
    if modules:
        sys.meta_path.insert(0, _SourceFinder(modules))


class _SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    def __init__(self, modules: Iterable[SentModule]) -> None:
        self._sources = {module.name: module for module in modules}

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
