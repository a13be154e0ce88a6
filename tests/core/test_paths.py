"""Relative paths: what they mean, what is said where nothing is there, and a project that is moved as a whole."""

import os
import re
from pathlib import Path

import pandas as pd
import pytest

import rayfed
from helpers.commands import command
from rayfed.cli.main import main
from rayfed.core import paths
from rayfed.core.paths import absolute, enter, looked_in


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "project").mkdir()
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("RAYFED_CACHE", str(tmp_path / "cache"))
    return tmp_path / "project"


def test_a_path_belongs_to_the_folder_of_the_command(here, monkeypatch):
    assert [absolute(path) for path in ("a/b", "~/a", "/a")] == [here / "a/b", Path.home() / "a", Path("/a")]
    monkeypatch.setattr(paths, "_entered", None)
    enter(here / "not on this machine")
    assert (absolute("a"), absolute("/a")) == (here / "not on this machine/a", Path("/a"))
    assert (looked_in("a"), looked_in("/a"), looked_in("~/a")) == (f" in {here / 'not on this machine'}", "", "")
    assert Path.cwd() == here


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("here.npz", ["data={name: npz, file: here.npz}"]),
        ("here.parquet", ["partition={name: file, file: here.parquet}"]),
        ("photos", ["data={name: imagefolder, folder: photos}"]),
        ("set/PACS", ["data.name=pacs"]),
        ("no_such_module", ["model.name=no_such_module:Net"]),
    ],
)
def test_a_path_that_does_not_exist_is_refused_with_its_folder(name, values, here, monkeypatch, capsys):
    monkeypatch.setenv("RAYFED_DATA", "set")
    Path("space.yaml").write_text("arms: [{algorithm.name: fedavg}]")
    assert command("sweep")(["space.yaml", *values]) == 2
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert name in refusal
    assert str(here) in refusal
    assert not Path("results").exists()


LONG = "x" * 5000
NAMES = [LONG, f"{'x' * 250}/" * 20, f"/{LONG}", "~nosuchuser/x", f"~/{LONG}"]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20])
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "{}"],
        ["sweep", "{}"],
        ["run", "--dry-run", "results={}", "model.name=mlp", "data.per_domain=20", "local.batch_size=2"],
        ["run", "--dry-run", "data={name: npz, file: '{}'}"],
        ["run", "--dry-run", "data={name: csv, file: '{}', label: a}"],
        ["run", "--dry-run", "data={name: parquet, file: '{}', label: a}"],
        ["run", "--dry-run", "data={name: huggingface, folder: '{}'}"],
        ["run", "--dry-run", "data={name: imagefolder, folder: '{}', size: 8}"],
        ["run", "--dry-run", "data={name: mnist, root: '{}'}"],
        ["run", "--dry-run", "data={name: cifar10, root: '{}'}"],
        ["run", "--dry-run", "data.per_domain=20", "partition={name: file, file: '{}'}"],
        ["run", "--dry-run", "data.per_domain=20", "local.batch_size=2", "clock.profile={}.csv"],
        ["run", "--dry-run", "data.per_domain=20", "local.batch_size=2", "model={name: mlp, weights: '{}'}"],
        ["partition", "data.per_domain=20", "--save", "{}/x.parquet"],
        ["partition", "data.per_domain=20", "--plot", "/dev/null/{}.png"],
        ["report", "{}"],
        ["data", "mnist", "--root", "{}"],
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_a_path_that_no_file_can_have_is_refused_in_a_line(name, arguments, capsys):
    code = main([each.replace("{}", name) for each in arguments])
    line = capsys.readouterr().err.strip()
    assert "\n" not in line
    if name == "~nosuchuser/x":  # a folder of this name may be made
        assert code in (0, 2)
    else:
        assert code == 2
        assert len(line) < 1000


class TestACopyOfRayJobs:
    """Ray deletes the folder in which it runs a job, and names it after a hash."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        here = tmp_path / "session_1/runtime_resources/working_dir_files/_ray_pkg_0123"
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        return tmp_path / "home"

    def test_results_lie_below_the_home_and_are_read_from_there(self, home, capsys):
        values = [
            "data.per_domain=60",
            "model.name=mlp",
            "rounds=1",
            "tracking.tensorboard=true",
            "tracking.folder=boards",
        ]
        for more, folder in (([], "results"), (["results=my/results"], "my/results")):
            assert command("run")([*values, *more]) == 0
            (path,) = re.findall(r"read_parquet\('(.*)'\)", " ".join(capsys.readouterr().out.split()))
            assert path == f"{home.as_posix()}/{folder}/run/metrics"
            assert len(pd.read_parquet(path))
            assert rayfed.read_results(folder).trials["status"].tolist() == ["done"]
        assert list(home.glob("boards/**/events.out.*"))
        assert os.listdir() == []
