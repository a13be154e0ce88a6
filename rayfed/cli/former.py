"""Modules that used to be commands, such as `python -m rayfed.run`."""

import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn


def former_command(module: str, command: str, arguments: Sequence[str]) -> NoReturn:
    """Refuse the use of a module that was a command until `command` replaced it.

    Args:
        module: `__name__` of the module.
        command: The present command, such as "run".
        arguments: The arguments given to the former command.

    Raises:
        ImportError: The module is imported. It must not be: `import rayfed.run` would hide the function `rayfed.run`.
        SystemExit: The module is executed. The present command is printed and the exit code is 2.
    """
    if module != "__main__":
        raise ImportError(f"{module} is not a module to import; on the command line, use: rayfed {command}")
    present = ["rayfed", "list"] if "--list" in arguments else ["rayfed", command, *arguments]
    print(f"rayfed: python -m rayfed.{command} is no longer a command; use: {shlex.join(present)}", file=sys.stderr)
    sys.exit(2)
