"""An algorithm whose rounds last long enough to be struck by a fault, as a user's own module."""

from pathlib import Path

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
