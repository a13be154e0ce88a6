"""Commands that only read write nothing and remove nothing, whoever made what they read."""

import json

import pytest

import rayfed
from helpers.commands import TWO_CLIENTS
from helpers.image_sets import tree
from helpers.watcher import fingerprint, read_only, watched
from rayfed.records.owners import Owner
from rayfed.records.storage import open_storage

SPACE = """\
seeds: [0, 1]
data: {domains: [plain, font], per_domain: 60}
model: {name: mlp, hidden: [8]}
local.batch_size: 8
arms: [{algorithm.name: fedavg}, {algorithm.name: fedprox}]
"""
SMALL = ["data.per_domain=60", "data.domains=[plain, font]", "model.name=mlp", "model.hidden=[8]", "local.batch_size=8"]
PICTURES = ["data.name=imagefolder", "data.folder=pictures", "data.size=8"]
CLI = "rayfed.cli.main:main"
COMMANDS = {
    "report": (CLI, ["report", "results"]),
    "report one": (CLI, ["report", "results", "--experiment", "own", "--rule", "final"]),
    "report csv": (CLI, ["report", "results", "--format", "csv"]),
    "report latex": (CLI, ["report", "results", "--format", "latex", "--target", "0.1"]),
    "list": (CLI, ["list"]),
    "list one": (CLI, ["list", "fedprox", "spaces"]),
    "data": (CLI, ["data"]),
    "data one": (CLI, ["data", "mnist", "--root", "pictures"]),
    "docs": (CLI, ["docs", "index"]),
    "partition": (CLI, ["partition", *SMALL]),
    "partition of files": (CLI, ["partition", *PICTURES]),
    "check": (CLI, ["check", *SMALL]),
    "run --dry-run": (CLI, ["run", "--dry-run", *SMALL]),
    "run --dry-run resume": (CLI, ["run", "--dry-run", "experiment=own", "resume=true", *SMALL]),
    "sweep --dry-run": (CLI, ["sweep", "--dry-run", "space.yaml", "experiment=own", "resume=true"]),
    "load": ("helpers.reading:load", ["results", "own", "TRIAL"]),
    "read_results": ("helpers.reading:read_results", ["results"]),
    "doctor": (CLI, ["doctor", "--no-ray"]),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with results, data and a search space, and the trial that is done.

    Of the results, one trial has lost its process, and one is somebody else's: its owner names files of ours.
    """
    home = tmp_path_factory.mktemp("home")
    result = rayfed.run({**TWO_CLIENTS, "rounds": 1, "results": str(home / "results"), "experiment": "own"})
    rows = home / "results" / "own" / "trials" / ".rows"
    row = json.loads((rows / f"{result.trial}.json").read_text())
    owner = Owner(open_storage(home / "results").child("own"))
    lost = {"status": "running", "owner": owner.name}
    hostile = {"status": "running", "owner": "host 1 2026-01-01T00:00:00 ../../../victim/composer"}
    for name, values in {"lost": lost, "hostile": hostile}.items():
        (rows / f"{name}.json").write_text(json.dumps({**row, **values, "trial": name}))
    owners = home / "results" / "own" / ".owners"
    files = {path: path.read_bytes() for path in owners.iterdir()}
    owner.release()
    for path, content in files.items():  # as after kill -9
        path.write_bytes(content)
    (home / "victim").mkdir()
    for ending in ("json", "lock"):
        (home / "victim" / f"composer.{ending}").write_text("mine")
    (home / "space.yaml").write_text(SPACE)
    tree(home / "pictures", ["a", "b"], ["x", "y"])
    return home, result.trial


def all_watched(home, scratch):
    """Run all commands in one process."""
    folder, trial = home
    filled = {
        name: (function, [trial if each == "TRIAL" else each for each in arguments])
        for name, (function, arguments) in COMMANDS.items()
    }
    return watched(filled, folder, scratch)


@pytest.fixture(scope="module")
def seen(home, tmp_path_factory):
    return all_watched(home, tmp_path_factory.mktemp("scratch"))


@pytest.fixture(scope="module")
def seen_read_only(home, tmp_path_factory):
    with read_only(home[0]):
        return all_watched(home, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_written_or_removed(seen, name):
    call = seen[name]
    assert (call.code, call.changed, call.is_folder_changed) == (0, [], False), call.printed


@pytest.mark.parametrize("name", COMMANDS)
def test_a_folder_that_nobody_may_write_to_is_read(seen_read_only, name):
    call = seen_read_only[name]
    assert call.code == (name == "doctor"), call.printed  # who says that no run can write there


def test_a_report_says_what_it_leaves_out_and_which_trial_is_lost(seen):
    words = "Left out: results/own/trials/.rows/hostile.json: damaged, not the row that rayfed wrote (owner is 'host 1"
    assert words in " ".join(seen["report"].printed.split())
    assert "1 of 2 trials are not done and do not count: 1 lost." in seen["report"].printed


@pytest.mark.ray
def test_a_doctor_that_starts_ray_writes_nothing_here(home, tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", "/tmp")  # Ray's sockets need short paths
    before = fingerprint(home[0])
    doctor = {"doctor": (CLI, ["doctor"])}
    call = watched(doctor, home[0], tmp_path)["doctor"]
    assert (call.code, fingerprint(home[0]) == before) == (0, True), call.printed
