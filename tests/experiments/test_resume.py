"""A run that is killed (SIGKILL, so nothing can tidy up) and resumed ends as one that was never interrupted."""

import importlib
import linecache
import os
import re
import signal
import subprocess
import sys

import pandas as pd
import pytest

from helpers.commands import command
from helpers.outcomes import assert_same_results

main = command("run")

MORTAL = """
import os, signal
from dataclasses import dataclass
from rayfed.algorithms.scaffold import Scaffold
from rayfed.core.options import option

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


@pytest.fixture
def here(here):
    (here / "resume_mortal.py").write_text(MORTAL)
    return here


def killed(*arguments, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "rayfed", "run", *COMMON, *arguments],
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
    assert pd.read_parquet("cut/run/trials")["status"].tolist() == ["running"]  # nobody could say otherwise
    assert pd.read_parquet("cut/run/rounds")["round"].max() in (3, 4, 5)
    assert main([*COMMON, *arguments, "results=cut", "resume=true"]) == 0
    assert_same_results("cut", "whole")


def test_damaged_checkpoints_are_told_in_one_line(here, capsys):
    """The older one is used, and without any, what was there is still there."""
    values = [*COMMON, "algorithm.name=scaffold", "checkpoint.every=1"]
    for folder in ("cut", "whole"):
        assert main([*values, f"results={folder}"]) == 0
    for count, code, words in (
        (1, 0, r"rayfed: checkpoint 8 of \S+ is damaged: .*; continues from checkpoint 7, after round 7"),
        (2, 2, r"rayfed: checkpoint \d of scaffold-seed0-.*; checkpoint \d of .*resume=false"),
    ):
        for path in sorted(here.glob("cut/run/checkpoints/*/server-*"))[-count:]:
            path.write_bytes(path.read_bytes()[:-200])
        capsys.readouterr()
        assert main([*values, "results=cut", "resume=true"]) == code
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if re.fullmatch(words, line)] == [line for line in lines if "checkpoint" in line]
        assert_same_results("cut", "whole")


HALVING = """
from dataclasses import dataclass
from rayfed.algorithms.fedavg import FedAvg
from rayfed.core.trees import scale

def less(weights):
    return scale(weights, 0.5)

@dataclass(frozen=True, kw_only=True)
class Halving(FedAvg):
    def aggregate(self, ctx, server, replies):
        return {"weights": less(replies.mean["weights"])}
"""


class TestChangedCode:
    """Of the user's own algorithm. Each run imports it again, as a new process would."""

    @pytest.fixture
    def ended(self, here, monkeypatch, capsys):
        """A run with the given source of the module: its exit code and what it said."""
        monkeypatch.setattr(sys, "dont_write_bytecode", True)

        def ended(code, *arguments):
            (here / "resume_halving.py").write_text(code)
            sys.modules.pop("resume_halving", None)
            importlib.invalidate_caches()
            linecache.clearcache()
            capsys.readouterr()
            given = (*COMMON, "rounds=2", "checkpoint.every=1", "algorithm.name=resume_halving:Halving", *arguments)
            return main(given), capsys.readouterr().err.splitlines()

        yield ended
        sys.modules.pop("resume_halving", None)

    def test_what_other_code_left_is_not_gone_on_from(self, ended):
        assert ended(HALVING)[0] == 0
        commented = HALVING.replace("def less", "# a word\ndef less")
        for text in (commented, HALVING.replace("0.5", "0.25"), HALVING.replace("replies.mean", "replies.means")):
            code, lines = ended(text, "resume=true")
            assert code == 2, lines
            expected = r"rayfed: resume=true: your own code changed since Halving-seed0-\w+ ran; .*"
            assert re.fullmatch(expected, lines[-1])
            assert "resume=anyway" in lines[-1]
        assert ended(commented, "resume=anyway", "rounds=3")[0] == 0
        assert ended(commented, "resume=true", "rounds=3")[0] == 0
        changed = HALVING.replace("0.5", "0.25")
        assert ended(changed, "resume=true", "experiment=other")[0] == 0
        assert ended(changed, "rounds=3")[0] == 0
        assert ended(changed, "resume=true", "rounds=3")[0] == 0


def test_a_new_start_leaves_no_old_checkpoint_to_resume_from(here):
    """Killed before its first save, it would else go on from what another attempt had saved."""
    assert main([*COMMON, "rounds=2", "checkpoint.every=1"]) == 0
    assert list(here.glob("results/run/checkpoints/*/manifest-*.json"))
    assert main([*COMMON, "rounds=2"]) == 0
    assert not list(here.glob("results/run/checkpoints/*/manifest-*.json"))
