"""A run that is killed (SIGKILL, so nothing can tidy up) and resumed ends as one that was never interrupted."""

import os
import signal
import subprocess
import sys
import time

import pandas as pd
import pytest

from rayfed.run import main

MORTAL = """
import os, signal
from dataclasses import dataclass
from rayfed.algorithms.scaffold import Scaffold
from rayfed.options import option

@dataclass(frozen=True, kw_only=True)
class Mortal(Scaffold):
    def aggregate(self, ctx, server, replies):
        if ctx.round == int(os.environ.get("DIE_IN_ROUND", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().aggregate(ctx, server, replies)
"""

COMMON = (
    "rounds=8",
    "cohort=2",
    "data={domains: [plain, font], per_domain: 60}",
    "partition={name: dirichlet, clients: 5, alpha: 10}",
    "model={name: mlp, hidden: [8], batch_norm: true}",
    "local={batch_size: 6, lr: 0.1}",
)
KEYS = ["round", "client", "domain", "split", "point", "metric"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resume_mortal.py").write_text(MORTAL)
    return tmp_path


def tables(folder):
    return [pd.read_parquet(f"{folder}/run/{name}") for name in ("metrics", "rounds", "trials")]


def same(results, expected):
    """Equal outcomes, and no row twice or missing."""
    metrics, rounds, trials = tables(results)
    metrics0, rounds0, trials0 = tables(expected)
    assert trials["status"].tolist() == ["done"]
    assert trials["weights_hash"].tolist() == trials0["weights_hash"].tolist()
    assert trials["trial"].tolist() == trials0["trial"].tolist()
    assert trials["rounds_done"].tolist() == trials0["rounds_done"].tolist()
    assert trials["error"].isna().all()
    assert sorted(rounds["round"]) == list(range(1, 9))
    columns = ["round", "stage", "bytes_down", "bytes_up", "cohort"]
    pd.testing.assert_frame_equal(
        rounds.sort_values("round")[columns].reset_index(drop=True),
        rounds0.sort_values("round")[columns].reset_index(drop=True),
    )
    assert not metrics.duplicated(KEYS).any()
    a, b = (m.sort_values(KEYS)[[*KEYS, "value", "n"]].reset_index(drop=True) for m in (metrics, metrics0))
    pd.testing.assert_frame_equal(a, b, check_exact=True)


def killed(*arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "rayfed.run", *COMMON, *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_killed_between_checkpoints(here):
    """Every third round is saved and the kill falls into the sixth: rounds 4 and 5 are run once more."""
    arguments = ("algorithm.name=resume_mortal:Mortal", "checkpoint.every=3")
    assert main([*COMMON, *arguments, "results=whole"]) == 0
    killed(*arguments, "results=cut", env={"DIE_IN_ROUND": "6"})
    _, rounds, trials = tables("cut")
    assert trials["status"].tolist() == ["running"]  # nobody could say otherwise
    assert rounds["round"].max() in (3, 4, 5)
    assert main([*COMMON, *arguments, "results=cut", "resume=true"]) == 0
    same("cut", "whole")


@pytest.mark.parametrize("name", ["scaffold"])
def test_killed_at_any_moment(here, name):
    arguments = (f"algorithm.name={name}", "checkpoint.every=1")
    assert main([*COMMON, *arguments, "results=whole"]) == 0
    command = [sys.executable, "-m", "rayfed.run", *COMMON, *arguments, "results=cut"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not list((here / "cut").glob("run/checkpoints/*.pt")) and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert list((here / "cut").glob("run/checkpoints/*.pt")), "was killed before its first checkpoint"
    assert main([*COMMON, *arguments, "results=cut", "resume=true"]) == 0
    same("cut", "whole")


class TestWithoutAKill:
    ARGUMENTS = ("algorithm.name=scaffold", "checkpoint.every=2")

    @pytest.fixture(autouse=True)
    def whole(self, here):
        assert main([*COMMON, *self.ARGUMENTS, "results=whole"]) == 0

    def test_saving_changes_nothing(self):
        assert main([*COMMON, "algorithm.name=scaffold", "results=plain"]) == 0
        same("plain", "whole")

    def test_resuming_what_is_done_changes_nothing(self):
        before = tables("whole")
        assert main([*COMMON, *self.ARGUMENTS, "results=whole", "resume=true"]) == 0
        same("whole", "whole")
        assert len(tables("whole")[0]) == len(before[0])

    def test_resuming_what_never_began_begins(self):
        assert main([*COMMON, *self.ARGUMENTS, "results=fresh", "resume=true"]) == 0
        same("fresh", "whole")

    def test_without_resume_it_starts_anew(self):
        assert main([*COMMON, *self.ARGUMENTS, "results=whole"]) == 0
        same("whole", "whole")

    @pytest.mark.parametrize("damage", [b"", b"nonsense", None])
    def test_a_damaged_checkpoint_is_told_in_one_line(self, here, capsys, damage):
        (path,) = here.glob("whole/run/checkpoints/*.pt")
        path.write_bytes(path.read_bytes()[:-200] if damage is None else damage)
        capsys.readouterr()
        assert main([*COMMON, *self.ARGUMENTS, "results=whole", "resume=true"]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert lines[-1].startswith("rayfed: checkpoint of scaffold-seed0-")
        assert "resume=false" in lines[-1]
        assert not any("Traceback" in line for line in lines)
        same("whole", "whole")  # what was there is still there
