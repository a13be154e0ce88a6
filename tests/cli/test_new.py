"""`rayfed new`: what it writes runs at once and passes its own test, and nothing is overwritten."""

import runpy
import shlex

import pandas as pd
import pytest

from rayfed.cli.main import main


@pytest.fixture
def new(here, capsys):
    """Runs `rayfed new` in an empty folder and returns the commands that it prints."""

    def run(*arguments):
        assert main(["new", *arguments]) == 0
        return [line.strip() for line in capsys.readouterr().out.splitlines()[1:]]

    return run


@pytest.mark.parametrize(("kind", "name"), [("method", "fresh_method"), ("dataset", "dataset")])
def test_code_runs_at_once_and_passes_its_test(new, tmp_path, kind, name):
    run, test = new(kind, name)
    assert main(shlex.split(run)[1:]) == 0
    (row,) = pd.read_parquet("results/run/trials").to_dict("records")
    assert name in row["algorithm" if kind == "method" else "data.name"]
    assert test == f"python -m pytest test_{name}.py"
    runpy.run_path(str(tmp_path / f"test_{name}.py"))["test_the_contract_is_kept"]()


def test_a_sweep_runs_at_once(new):
    (command,) = new("sweep", "no-2 fresh")
    assert main([*shlex.split(command)[1:], "search.max_concurrent=1", "rounds=1"]) == 0
    trials = pd.read_parquet("results/no-2 fresh/trials")
    assert sorted(zip(trials["algorithm"], trials["algorithm.mu"].fillna(0), trials["seed"], strict=True)) == [
        *(("fedavg", 0, seed) for seed in (0, 1)),
        *(("fedprox", mu, seed) for mu in (0.01, 0.1) for seed in (0, 1)),
    ]


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(new, tmp_path, capsys, there):
    (tmp_path / there).write_text("")
    assert main(["new", "dataset", "mine"]) == 2
    assert capsys.readouterr().err.startswith(f"rayfed: {there}: is there already")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(there, "")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("method", "my-method"), "my-method: not a name that Python can import"),
        (("method", "class"), "class: not a name that Python can import"),
        (("sweep", "../mine"), "NAME='../mine': use a name without /"),
        (("metric", "mine"), "argument kind: invalid choice: 'metric'"),
    ],
)
def test_what_cannot_be_written_is_refused(new, tmp_path, capsys, arguments, said):
    assert main(["new", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"rayfed: {said}")
    assert list(tmp_path.iterdir()) == []
