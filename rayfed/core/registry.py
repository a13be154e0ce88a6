"""Lookup of components by name: rayfed's own by their registered name, a user's by `module:Attribute`."""

import importlib
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from rayfed.core.errors import UsageError, error_line
from rayfed.core.options import suggestion
from rayfed.core.paths import working_folder


class ModuleSource(NamedTuple):
    """The source of a user's module as it was imported, with which machines without its file import it."""

    name: str
    file: str
    is_package: bool
    text: str


def resolve(name: str, table: Mapping[str, str], *, where: str) -> Any:
    """Import and return the object called `name`.

    Modules are also searched for in the working directory: a class in `./mine.py` is `mine:MyMethod`.

    Args:
        name: A key of `table`, or "module:Attribute" for an object of the user's.
        table: "module:Attribute" by registered name.
        where: The key that holds `name`, for error messages.

    Raises:
        UsageError: The name is unknown, or the module or its attribute cannot be found or imported.
    """
    target = table.get(name, name)
    if ":" not in target:
        near = suggestion(name, table)
        raise UsageError(f"{where}={name}: {near} (write a class of your own as module:Name)")
    module_name, attribute = target.split(":", 1)
    if target == name and str(working_folder()) not in sys.path:
        sys.path.insert(0, str(working_folder()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            missing = f"no module {module_name!r} in {working_folder()} or the installed packages"
            raise UsageError(f"{where}={name}: {missing}") from error
        if target != name:
            raise  # a module of rayfed's: a bug here, not a mistake of the user's
        reason = error_line(error)
        raise UsageError(f"{where}={name}: importing {module_name} fails: {reason}") from error
    if not hasattr(module, attribute):
        public = []
        for key in vars(module):
            if not key.startswith("_"):
                public.append(key)
        near = suggestion(attribute, public)
        raise UsageError(f"{where}={name}: {module_name} has no {attribute!r}; {near}")
    return getattr(module, attribute)
