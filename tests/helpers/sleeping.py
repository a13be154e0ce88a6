"""Commands with an algorithm whose rounds last long enough to be struck by a fault, as a user's own module."""

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import pytest

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


@contextlib.contextmanager
def sleeping_here(folder: Path, module: str, *, seeds: Sequence[int]) -> Iterator[None]:
    """Work in `folder`, with `module`, which has the algorithm `Sleeping`, and space.yaml.

    Each test file needs another name of the module.
    """
    (folder / f"{module}.py").write_text(_SOURCE)
    (folder / "space.yaml").write_text(f"seeds: {seeds}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        yield


def last_rounds(folder: str | Path) -> list[int]:
    """Return the last round on disk of each trial of the experiment `run` that has any."""
    files = Path(folder).glob("run/rounds/*.parquet")
    try:
        return [max(pd.read_parquet(file, columns=["round"])["round"], default=0) for file in files]
    except OSError:  # pandas opens a file twice, and it was replaced in between
        return []


def ran(name: str, values: Sequence[str], *arguments: str) -> tuple[int, str]:
    """Give `rayfed run`, or `rayfed sweep space.yaml`, in this process; return the exit code and what it said."""
    files = ["space.yaml"] if name == "sweep" else []
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = command(name)([*files, *values, *arguments])
    assert "Traceback" not in err.getvalue()
    return code, err.getvalue()
