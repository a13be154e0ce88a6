"""`rayfed run` and `rayfed list`: help, a file with overrides, what is printed, and exit codes."""

import dataclasses
import inspect
import re
import subprocess
import sys

import pandas as pd
import pytest

from helpers.commands import command
from helpers.federations import blobs
from rayfed.algorithms import ALGORITHMS
from rayfed.core.registry import resolve
from rayfed.data.partitions import PARTITIONS
from rayfed.data.population import TestSet
from rayfed.data.sets import DATASETS
from rayfed.experiments import plan_data
from rayfed.experiments.config import GROUPS, Config
from rayfed.metrics import METRICS
from rayfed.models import MODELS

main = command("run")
list_names = command("list")

YAML = """
experiment: try
rounds: 3
data: {domains: [plain, font], per_domain: 60}
model: {name: mlp, hidden: [8]}
local: {lr: 0.1, batch_size: 8}
algorithm.name: fedprox
"""


@pytest.fixture
def here(here):
    (here / "try.yaml").write_text(YAML)
    return here


class TestHelp:
    @pytest.mark.parametrize("flag", ["-h", "--help"])
    def test_mentions_every_key_with_its_default_and_meaning(self, capsys, flag):
        assert main([flag]) == 0
        out = capsys.readouterr().out
        keys = [f"{key}.name" for key in ("algorithm", "data", "partition", "model")]
        keys += [field.name for field in dataclasses.fields(Config) if field.metadata]
        keys += [f"{group}.{field.name}" for group, kind in GROUPS.items() for field in dataclasses.fields(kind)]
        missing = [key for key in keys if not re.search(rf"^ +{re.escape(key)}( |$)", out, re.MULTILINE)]
        assert not missing
        assert len(keys) > 30
        assert re.search(r"^ +local\.lr = 0\.01 +learning rate", out, re.MULTILINE)
        assert "evaluate.splits = ['val', 'test']" in out
        assert max(map(len, out.splitlines())) <= 120


class TestList:
    def test_has_every_name_and_for_a_kind_its_keys(self, capsys):
        assert list_names([]) == 0
        out = capsys.readouterr().out
        for name in (*ALGORITHMS, *DATASETS, *PARTITIONS, *MODELS, *METRICS):
            assert re.search(rf"^  {re.escape(name)} +\S", out, re.MULTILINE), name
        assert "rayfed list KIND" in out.splitlines()[-1]
        assert list_names(["algorithms", "datasets", "partitions", "models", "metrics"]) == 0
        with_keys = capsys.readouterr().out
        keys = "algorithm.mu", "algorithm.server_lr", "data.per_domain", "partition.alpha", "model.width"
        for key in (*keys, "metrics.mdl.seeds"):
            assert re.search(rf"^ +{re.escape(key)}( |$)", with_keys, re.MULTILINE)
            assert key not in out

    @pytest.mark.parametrize("name", ALGORITHMS)
    def test_every_method_has_its_equations(self, capsys, name):
        assert list_names([name]) == 0
        text = capsys.readouterr().out.partition("\n  source: ")[0]
        module = inspect.getmodule(resolve(name, ALGORITHMS, where="algorithm.name"))
        equations = [line for line in module.__doc__.splitlines() if line.startswith("    ")]
        assert re.search("[=←+]", "".join(equations))
        assert set(text.splitlines()) >= {f"  {line}" for line in equations}
        assert not re.search(r"see `\S+`", text.splitlines()[2])


class TestRun:
    def test_a_file_with_overrides(self, here, capsys):
        assert main(["try.yaml", "rounds=2", "algorithm.mu=0.5"]) == 0
        out, err = capsys.readouterr()
        assert "fedprox" in out
        assert re.search(r"^algorithm +font +plain +AVG$", out, re.MULTILINE)
        (shown,) = re.findall(r"pandas.read_parquet\('(.*)'\)", out)
        assert shown == str(here / "results" / "try" / "metrics") or shown == "results/try/metrics"
        metrics = pd.read_parquet(shown)
        assert metrics["round"].max() == 2
        (row,) = pd.read_parquet("results/try/trials").to_dict("records")
        assert (row["algorithm.mu"], row["rounds"], row["local.lr"], row["status"]) == (0.5, 2, 0.1, "done")
        assert out.rstrip().splitlines()[-1] == f"weights {row['weights_hash']}"
        assert "2 clients" in err
        assert "Traceback" not in err

    @pytest.mark.parametrize(
        ("more", "words"),
        [
            (["evaluate.splits=[]"], "no table: no model was scored; "),
            (
                ["partition.name=iid", "partition.test=0", "partition.validation=0", "local.batch_size=4"],
                "no table: no model was scored; ",
            ),
            (["partition.test=0", "evaluate.points=[trained]"], "try: val accuracy, %, at"),
            (["leave_out=[font]", "partition.test=0", "evaluate.points=[downloaded]"], "try: out-of-domain accuracy"),
        ],
    )
    def test_a_run_that_is_done_is_done_whatever_there_is_to_show(self, here, capsys, more, words):
        assert main(["try.yaml", "rounds=1", *more]) == 0
        out, err = capsys.readouterr()
        assert words in out
        assert out.rstrip().splitlines()[-1].startswith("weights ")
        assert "Traceback" not in err

    def test_a_test_set_that_is_not_scored_is_said(self, here, capsys, monkeypatch):
        """FedPer keeps the head with the clients, so that the server has no whole model."""
        tests = (TestSet("0°", "test", blobs(1).clients[0].test),)
        monkeypatch.setattr(plan_data, "load_data", lambda config: dataclasses.replace(blobs(3), tests=tests))
        config = ["try.yaml", "rounds=1", "model={name: mlp, hidden: [4]}"]
        assert main([*config, "algorithm={name: fedper}"]) == 0
        words = "not scored: the server's test sets (0°; split test), because fedper has no global model here; use an"
        assert words in capsys.readouterr().err
        assert main([*config, "algorithm={name: fedavg}"]) == 0
        assert "not scored" not in capsys.readouterr().err


def test_a_refusal_is_one_line_and_exit_code_2(here, capsys):
    assert main(["try.yaml", "local.lr=-1"]) == 2
    assert capsys.readouterr() == ("", "rayfed: local.lr=-1.0: must be more than 0\n")
    assert not (here / "results").exists()


def test_divergence_is_one_line_and_exit_code_1(here):
    """In a process of its own, as a shell sees it."""
    command = [sys.executable, "-m", "rayfed", "run", "try.yaml", "local.lr=1e30", "model.hidden=[]"]
    done = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"rayfed: round \d, .*", done.stderr.splitlines()[-1])
    assert "Traceback" not in done.stderr
    assert pd.read_parquet(here / "results" / "try" / "trials")["status"].tolist() == ["diverged"]
