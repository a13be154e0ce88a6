"""Commands with an algorithm whose rounds last long enough to be struck by a fault, as a user's own module."""

import contextlib
import io
from collections.abc import Sequence
from pathlib import Path

from helpers.commands import command

_SOURCE = """
import time
from dataclasses import dataclass
from rayfed.algorithms.scaffold import Scaffold

@dataclass(frozen=True, kw_only=True)
class Sleeping(Scaffold):
    def aggregate(self, ctx, server, replies):
        time.sleep(0.15)
        return super().aggregate(ctx, server, replies)
"""


def write_sleeping(folder: Path, module: str) -> None:
    """Write the module `module` with the algorithm `Sleeping` to `folder`; each test file needs a name of its own."""
    (folder / f"{module}.py").write_text(_SOURCE)


def ran(name: str, values: Sequence[str], *arguments: str) -> tuple[int, str]:
    """Give `rayfed run`, or `rayfed sweep space.yaml`, in this process; return the exit code and what it said."""
    files = ["space.yaml"] if name == "sweep" else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(name)([*files, *values, *arguments])
    assert "Traceback" not in err.getvalue()
    return code, err.getvalue()
