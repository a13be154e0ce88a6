"""Trackers beside TensorBoard: W&B offline, MLflow with files, and a user's own. Killed, resumed, and read back."""

import json
import os
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from rayfed.core.errors import UsageError
from rayfed.records.tracking import Trackers, check_tracking

VALUES = {"algorithm": {"name": "fedprox", "mu": 0.1}, "seed": 0, "default_eval_point": "global"}
ATTEMPT = """
import os, sys, time
from pathlib import Path
from rayfed.records.mlflow_runs import MlflowRuns
from rayfed.records.wandb_runs import WandbRuns
kind, first, last, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
tracker = WandbRuns(Path("."), "e") if kind == "wandb" else MlflowRuns("e")
option = "project" if kind == "wandb" else "file://" + os.path.abspath("mlruns")
values = {"algorithm": {"name": "fedprox", "mu": 0.1}, "seed": 0, "tracking": {kind: option}}
tracker.begin("t", values, None if first == 1 else first - 1)
for round in range(first, last + 1):
    tracker.record("t", round, {"global/test/accuracy": round / 10, "round/bytes up": 5.0})
if how == "ends":
    tracker.end("t", "done")
time.sleep(8)  # W&B hands values to a process of its own
os._exit(0)
"""


def attempts(kind, folder):
    """Rounds 1 to 4, then a kill; rounds 3 to 6 after the checkpoint of round 2."""
    for first, last, how in ((1, 4, "killed"), (3, 6, "ends")):
        command = [sys.executable, "-c", ATTEMPT, kind, str(first), str(last), how]
        subprocess.run(command, cwd=folder, check=True, timeout=400, env=os.environ | {"WANDB_MODE": "offline"})


@pytest.mark.slow
def test_mlflow_has_every_step_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    attempts("mlflow", tmp_path)
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.status, run.info.run_name, run.data.params["algorithm.mu"]) == ("FINISHED", "t", "0.1")
    for name, value in (("global/test/accuracy", lambda step: step / 10), ("round/bytes_up", lambda step: 5.0)):
        history = client.get_metric_history(run.info.run_id, name)
        assert [(metric.step, metric.value) for metric in history] == [(step, value(step)) for step in range(1, 7)]


@pytest.mark.slow
def test_wandb_has_no_step_twice(tmp_path):
    pytest.importorskip("wandb")
    attempts("wandb", tmp_path)
    steps, ids = Counter(), set()
    for file in tmp_path.rglob("*.wandb"):
        for record in records_of(file):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            if record.WhichOneof("record_type") == "history":
                values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
                steps[int(values["_step"])] += 1
                assert float(values["global/test/accuracy"]) == int(values["_step"]) / 10
    assert len(ids) == 1
    assert set(steps.values()) == {1}
    assert {5, 6} <= steps.keys() <= set(range(1, 7))  # what W&B had not written before the kill is lost
    (state,) = tmp_path.rglob("rayfed.json")
    assert json.loads(state.read_text())["last"] == 6


def records_of(file):
    """Read a file of W&B's with its own protocol: a header of 7 bytes, then a log as LevelDB writes it."""
    from wandb.proto import wandb_internal_pb2

    content, position, parts = file.read_bytes(), 7, b""
    while position + 7 <= len(content):
        left = 32768 - position % 32768  # of the block
        if left < 7:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind = content[position + 6]
        parts += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


OWN = """
class Mine:
    calls = []

    def begin(self, trial, values, continues):
        self.calls.append(("begin", trial, continues))

    def record(self, trial, round, values):
        if trial == "b":
            raise OSError(28, "No space left on device")
        self.calls.append((trial, round, values))

    def end(self, trial, status):
        self.calls.append(("end", trial, status))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "mine_tracker.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "mine_tracker:Mine"
    sys.modules.pop("mine_tracker", None)


def test_an_own_tracker_that_fails_for_one_trial_goes_on_for_others(own):
    trackers = Trackers([])
    for trial in "ab":
        trackers.begin(trial, VALUES | {"tracking": {"trackers": [own]}}, None)
    trackers.begin("c", VALUES | {"tracking": {"trackers": []}}, None)
    for round in (1, 2):
        for trial in "abc":
            trackers.record(trial, round, {"x": 1.0})
    for trial in "abc":
        trackers.end(trial, "done")
    (line,) = trackers.failures()
    assert line == (
        f"b: tracking.trackers={own} failed (OSError: [Errno 28] No space left on device); the trial went on without it"
    )
    calls = sys.modules["mine_tracker"].Mine.calls
    assert calls == [
        *(("begin", "a", None), ("begin", "b", None)),
        *(("a", 1, {"x": 1.0}), ("a", 2, {"x": 1.0})),
        ("end", "a", "done"),
    ]


@pytest.mark.parametrize(
    ("options", "results", "message"),
    [
        ({"wandb": "p"}, "s3://bucket/x", "tracking.wandb=p: needs a local folder, and results=s3://bucket/x is none"),
        ({"trackers": ["nothing_here:Mine"]}, "results", "tracking.trackers=nothing_here:Mine: no module"),
        (
            {"trackers": ["collections:OrderedDict"]},
            "results",
            "tracking.trackers=collections:OrderedDict: has no",
        ),
        ({"mlflow": "uri"}, "results", "tracking.mlflow=uri: needs the package mlflow, which is not installed"),
    ],
)
def test_refusals(options, results, message, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mlflow" else object())
    plain = {"tensorboard": None, "wandb": None, "mlflow": None, "trackers": [], "folder": None}
    with pytest.raises(UsageError) as error:
        check_tracking(SimpleNamespace(**plain | options), results)
    assert str(error.value).startswith(message)
