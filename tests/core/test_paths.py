"""Relative paths: what they mean, what is said where nothing is there, and a project that is moved as a whole."""

import os
import re
from pathlib import Path

import pandas as pd
import pytest

import rayfed
from helpers.commands import command
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
