"""Exceptions that rayfed raises deliberately, and the one line by which a command shows any exception."""

import contextlib
import functools
import importlib.util
import os
import re
import sysconfig
import traceback
from pathlib import Path
from typing import Any

_RAYFED = Path(__file__).parents[1]
_FRAME = re.compile(r'^\s*File "(.+\.py)", line (\d+), in (.+)$', re.MULTILINE)
_LONGEST = 500  # characters of a message
_LONG_WORD = re.compile(r"(\S{200})\S{200,}(\S{50})")
_SECRETS = re.compile(r"://\S*@")
_LONGEST_VALUE = 200  # characters of a value in a message
_MORE_ROOM = (
    "; give less to do at once (local.batch_size, placement.vmap_clients), keep less there "
    "(placement.data_on_device=false, placement.cuda_graphs=false), or reserve more of the GPU (placement.gpus)"
)
_BROKEN_DEVICE = "; the GPU fails in this process from now on, and the same command with resume=true continues"


class UsageError(ValueError):
    """The configuration or the arguments are invalid.

    The message is one line that says what is wrong, where, and what is allowed. The commands print it and exit with
    code 2 before anything has started. Characters of keys and file names that do not show are written as escapes, and
    very long words lose their middle.
    """

    def __init__(self, message: str = ""):
        super().__init__(_LONG_WORD.sub(r"\1…\2", printable(message)))


def printable(text: str) -> str:
    """Return `text` with escapes in place of characters that do not show, such as line ends and a terminal's codes."""
    if text.isprintable():
        return text
    return "".join(map(_escaped, text))


def _escaped(letter: str) -> str:
    """Return a letter, or its escape if it does not show."""
    if letter.isprintable():
        return letter
    return letter.encode("unicode_escape").decode()


def shown(value: object) -> str:
    """Return `value` as a message shows it: cut off if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        text = f"a {type(value).__name__} of very many digits"
    if len(text) <= _LONGEST_VALUE:
        return text
    return f"{text[:_LONGEST_VALUE]}…"


class Diverged(RuntimeError):
    """Training produced a value that is not finite. The message names the round, the client and the value."""


class HostLost(RuntimeError):
    """A process of Ray did not start or died. Everything recorded and checkpointed before that is kept."""


class RayNotStarted(HostLost):
    """Ray is not installed or did not start. The message has the folder of its logs and what to do."""


class BadHook(RuntimeError):
    """A hook of an algorithm violates the interface. The message names the class and the hook."""


class StorageError(RuntimeError):
    """Results could not be written or read, for example because the disk is full. Everything saved before is kept."""


@functools.cache
def is_user_file(file: str) -> bool:
    """Return whether `file` belongs neither to rayfed, nor to Python, nor to an installed package."""
    path = Path(file)
    real = Path(os.path.realpath(file))
    if {"site-packages", "dist-packages"} & {*path.parts, *real.parts}:
        return False
    if any(real.is_relative_to(folder) for folder in _folders_of_others()):
        return False
    return not any(map(_has_installed_packages, path.parents))


@functools.cache
def _folders_of_others() -> tuple[str, ...]:
    """Return the folders of Python's own modules and of rayfed."""
    paths = sysconfig.get_paths()
    folders = (paths["stdlib"], paths["platstdlib"], _RAYFED)
    return tuple(os.path.realpath(folder) for folder in folders)


@functools.cache
def _has_installed_packages(folder: Path) -> bool:
    """Return whether packages lie in a folder, as after `pip install --target`."""
    return any(folder.glob("*.dist-info/INSTALLER"))


def is_user_module(name: str) -> bool:
    """Return whether a module is the user's own, by the file of its outermost package; `__main__` always is."""
    if name == "__main__":
        return True
    with contextlib.suppress(Exception):  # of names without a module, and of modules without a file
        spec: Any = importlib.util.find_spec(name.partition(".")[0])
        if spec.has_location:
            return is_user_file(spec.origin)
        return is_user_file(spec.submodule_search_locations[0])
    return False


def breaks_device(error: BaseException) -> bool:
    """Return whether CUDA fails in this process after `error`, as after a failed assertion in a kernel.

    Memory that is out breaks nothing.
    """
    text = str(error)
    return isinstance(error, RuntimeError) and "CUDA error" in text and "out of memory" not in text


def error_line(error: BaseException) -> str:
    """Return the type and the message of an error, and the place that raised it, in one line.

    The place is the innermost one in the user's own code, or else in rayfed, preferably outside `core/`: a method says
    more than a helper. The text of the traceback is searched, because an error of another process has no frames.
    """
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({error.filename}, line {error.lineno})"
    text = " ".join(str(error).split())
    if breaks_device(error):
        text = str(error).strip().partition("\n")[0] + _BROKEN_DEVICE  # without CUDA's advice for its developers
    if text:
        message = f"{type(error).__name__}: {text[:_LONGEST]}"
    else:
        message = type(error).__name__
    if type(error).__name__ == "OutOfMemoryError" and type(error).__module__ == "torch":
        message = message.rstrip(".") + _MORE_ROOM
    frames = _FRAME.findall("".join(traceback.format_exception(error)))
    for is_telling in (is_user_file, _is_above_core, _is_rayfeds):
        for file, line, function in reversed(frames):
            if is_telling(file):
                return f"{message} ({_from_here(file)}, line {line}, in {function})"
    return message


def _is_rayfeds(file: str) -> bool:
    return Path(file).is_relative_to(_RAYFED)


def _is_above_core(file: str) -> bool:
    return _is_rayfeds(file) and not Path(file).is_relative_to(_RAYFED / "core")


def _from_here(file: str) -> str:
    """Return the path of a file, relative to the current folder if the file is below it."""
    if Path(file).is_relative_to(Path.cwd()):
        return os.path.relpath(file)
    return file


def one_line(error: BaseException) -> str:
    """Return the message of `error` on one line, without secrets of URLs, or the name of its class.

    Characters that do not show are escapes: a message may quote a damaged file.
    """
    words = " ".join(str(error).split())
    return printable(without_secrets(words)) or type(error).__name__


def without_secrets(text: str) -> str:
    """Return `text` without what stands between :// and @, where URLs have users and passwords."""
    return _SECRETS.sub("://…@", text)
