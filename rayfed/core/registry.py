"""Names of the pieces one can choose, and how a user's own piece is found: `name` or `module:Attribute`."""

import importlib
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rayfed.core.errors import UsageError
from rayfed.core.options import suggestion


def resolve(name: str, table: Mapping[str, str], *, where: str) -> Any:
    """The object called `name`: an entry of `table` (name -> "module:Attribute") or "module:Attribute" of the user's.

    The working directory is searched for a user's module, so a file `mine.py` beside the user is `mine:MyMethod`.

    Raises:
        UsageError: unknown name, module that cannot be found, or no such attribute in it.
    """
    target = table.get(name, name)
    if ":" not in target:
        raise UsageError(f"{where}={name}: {suggestion(name, table)}; your own is written module:Name")
    module_name, attribute = target.split(":", 1)
    if not module_name or not attribute:
        raise UsageError(f"{where}={name}: your own is written module:Name")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever a user's file raises, it is the user who wants to know
        if isinstance(error, ModuleNotFoundError) and module_name.startswith(error.name or " "):
            missing = f"no module {module_name!r} in {here} or the installed packages"
            raise UsageError(f"{where}={name}: {missing}") from error
        if target != name:
            raise  # rayfed's own
        raise UsageError(f"{where}={name}: importing {module_name} fails: {_in_one_line(error)}") from error
    if not hasattr(module, attribute):
        public = [key for key in vars(module) if not key.startswith("_")]
        raise UsageError(f"{where}={name}: {module_name} has no {attribute!r}; {suggestion(attribute, public)}")
    return getattr(module, attribute)


def _in_one_line(error: Exception) -> str:
    """What a user's module raised, and where."""
    text = " ".join(str(error).split())
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    last = next((frame for frame in reversed(frames) if _is_users(frame.filename)), frames[-1])
    return f"{type(error).__name__}: {text} ({last.filename}, line {last.lineno})"


def _is_users(file: str) -> bool:
    """Whether `file` is neither Python's nor an installed package's nor rayfed's, so that the mistake may be there."""
    path, paths = Path(file), sysconfig.get_paths()
    others = [*(Path(paths[name]) for name in ("stdlib", "purelib", "platlib")), Path(__file__).parent]
    return path.is_file() and not any(path.is_relative_to(folder) for folder in others)
