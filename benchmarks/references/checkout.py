"""Modules of other projects, imported from a checkout that the user names. Nothing of them is part of rayfed."""

import contextlib
import importlib
import inspect
import io
import logging
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from rayfed.core.rng import global_state_kept


class Unavailable(Exception):
    """A checkout, or a file, a name or a package that it needs, is not as it was; the message is one line."""


class Checkout:
    """A working tree of another project.

    Args:
        name: The key of the project, which is also its option on the command line.
        path: The root of the working tree.
        tried: The commit with which the comparison was written.

    Raises:
        Unavailable: There is no such folder.
    """

    def __init__(self, name: str, path: str | Path, tried: str):
        self.name, self.path, self.tried = name, Path(path).resolve(), tried
        if not self.path.is_dir():
            raise Unavailable(f"--{name} {path}: there is no such folder; give a checkout (tried with commit {tried})")

    def verify(self) -> None:
        """Check that the working tree is that of the commit `tried`, with its code as it was.

        Raises:
            Unavailable: It is another commit, a source file was changed, or there is no git repository.
        """
        sources = ("--untracked-files=no", "--", "*.py", "*.pyx")
        head, changes = self._git("rev-parse", "HEAD"), self._git("status", "--porcelain", *sources)
        if head is None or changes is None or self._git("rev-parse", "--show-prefix"):
            raise self.changed("this is not the root of a git checkout")
        if not head.startswith(self.tried):
            raise self.changed(f"this is commit {head[: len(self.tried)]}")
        if changes:
            raise self.changed(f"changed files: {', '.join(line[2:].strip() for line in changes.splitlines())}")

    def _git(self, *arguments: str) -> str | None:
        """Return what git prints about the working tree, or None if it fails."""
        done = subprocess.run(["git", "-C", str(self.path), *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    def changed(self, what: str) -> Unavailable:
        """Return the error for something that is not as it was."""
        return Unavailable(f"--{self.name} {self.path}: {what}; this was written for commit {self.tried}")

    @contextlib.contextmanager
    def importing(self, root: str = ".", stand_ins: Mapping[str, Any] | None = None) -> Iterator["Importer"]:
        """Provide an importer of the modules below `root`, with `stand_ins` for packages that they import.

        A stand-in is a module, or the names that matter of one.

        Other projects call their top-level modules `utils` and `models`. Within the context these names mean the
        modules of this checkout; afterwards they mean again what they meant before. The current folder is a temporary
        one, what the other code prints is dropped, and random generators start from 0 and are restored at the end.
        """
        folder = self.path / root
        if not folder.is_dir():
            raise self.changed(f"the folder {root} is missing")
        mine = {entry.stem for entry in folder.iterdir() if entry.suffix == ".py" or entry.is_dir()}
        before = dict(sys.modules)
        here, path = os.getcwd(), list(sys.path)
        states = random.getstate(), np.random.get_state()
        for name in [name for name in sys.modules if name.split(".")[0] in mine]:
            del sys.modules[name]
        stand_ins = {
            name: stand_in
            for name, stand_in in (stand_ins or {}).items()
            if not (isinstance(stand_in, Package) and folder.joinpath(*name.split(".")).is_dir())
        }
        for name, stand_in in stand_ins.items():
            sys.modules[name] = _as_module(name, stand_in)
        sys.path.insert(0, str(folder))
        sys.dont_write_bytecode, bytecode = True, sys.dont_write_bytecode
        try:
            with (
                tempfile.TemporaryDirectory(prefix="rayfed-references-") as scratch,
                contextlib.redirect_stdout(io.StringIO()),
                _without_logging(),
                warnings.catch_warnings(),
                global_state_kept(),
            ):
                warnings.simplefilter("ignore")
                random.seed(0)
                np.random.seed(0)
                torch.manual_seed(0)
                os.chdir(scratch)
                try:
                    yield Importer(self, folder)
                finally:
                    os.chdir(here)
        finally:
            sys.dont_write_bytecode = bytecode
            sys.path[:] = path
            for name in [name for name in sys.modules if name.split(".")[0] in mine or name in stand_ins]:
                del sys.modules[name]
            sys.modules.update({name: module for name, module in before.items() if name not in sys.modules})
            random.setstate(states[0])
            np.random.set_state(states[1])


@contextlib.contextmanager
def _without_logging() -> Iterator[None]:
    """Drop what is logged, and undo what importing modules change about the root logger."""
    root = logging.getLogger()
    level, handlers, disabled = root.level, list(root.handlers), root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(disabled)
        root.setLevel(level)
        root.handlers[:] = handlers


class Importer:
    """Imports modules of one checkout within `Checkout.importing`."""

    def __init__(self, checkout: Checkout, folder: Path):
        self.checkout, self.folder = checkout, folder

    def __call__(self, module: str, *names: str) -> Any:
        """Return a module of the checkout, or the objects called `names` in it.

        Raises:
            Unavailable: The file or a name is not where it was, or the file needs a package that is not installed.
        """
        file = self.folder.joinpath(*module.split("."))
        if module not in sys.modules and not file.with_suffix(".py").is_file() and not (file / "__init__.py").is_file():
            raise self.checkout.changed(f"{file.relative_to(self.checkout.path)}.py is missing")
        try:
            loaded = importlib.import_module(module)
        except ImportError as error:
            raise self.checkout.changed(f"{module} cannot be imported ({error})") from error
        for name in names:
            if not hasattr(loaded, name):
                raise self.checkout.changed(f"{module} has no {name}")
        values = [getattr(loaded, name) for name in names]
        return loaded if not names else values[0] if len(values) == 1 else values

    def mended(self, function: Any, changes: Mapping[str, str]) -> Any:
        """Return a copy of a function of the checkout, in whose source each text is replaced by another.

        Raises:
            Unavailable: A text is not there.
        """
        source = textwrap.dedent(inspect.getsource(function))
        for old, new in changes.items():
            if old not in source:
                raise self.checkout.changed(f"{function.__module__}.{function.__qualname__} has no {old!r}")
            source = source.replace(old, new)
        names: dict[str, Any] = {}
        exec(compile(source, inspect.getfile(function), "exec"), function.__globals__, names)
        return names[function.__name__]


class Anything(ModuleType):
    """A stand-in for a module of which nothing is used: each of its names is a class that takes any arguments."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused


class Package(Anything):
    """A stand-in for a package above another stand-in, which is not needed where the checkout has the package."""


class Unused:
    """What a name of `Anything` is."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Unused


def anything(*names: str) -> dict[str, ModuleType]:
    """Return stand-ins for the modules called `names`, and for the packages above them that do not exist."""
    packages = {".".join(name.split(".")[:n]) for name in names for n in range(1, name.count(".") + 1)}
    stand_ins: dict[str, ModuleType] = {name: Anything(name) for name in names}
    for name in packages - stand_ins.keys():
        stand_ins[name] = Package(name)
    return stand_ins


def _as_module(name: str, stand_in: Any) -> ModuleType:
    if isinstance(stand_in, ModuleType):
        return stand_in
    module = Anything(name)
    vars(module).update(stand_in)
    return module
