"""Trackers beside TensorBoard: W&B offline, MLflow with files, and a user's own. Killed, resumed, and read back."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.records.tracking import Trackers, check_tracking

VALUES = {"algorithm": {"name": "fedprox", "mu": 0.1}, "seed": 0, "default_eval_point": "global"}
KILLED = """
import os, signal, sys
import rayfed

def kill_in_round_5(round):
    if round.number == 5:
        os.kill(os.getpid(), signal.SIGKILL)

config = {"data.per_domain": 30, "model": {"name": "mlp", "hidden": [4]}, "rounds": 6, "checkpoint.every": 2}
config |= {"tracking." + sys.argv[1]: sys.argv[2], "experiment": "e"}
if sys.argv[3] == "killed":
    rayfed.run(config, on_round=kill_in_round_5)
else:
    rayfed.run(config | {"resume": True})
"""


def killed_and_resumed(kind, where, folder):
    """Kill a run in its fifth round, after the checkpoint of the fourth, resume it, and return its tables."""
    environment = os.environ | {"WANDB_MODE": "offline"}
    for how, code in (("killed", -signal.SIGKILL), ("resumed", 0)):
        command = [sys.executable, "-c", KILLED, kind, where, how]
        assert subprocess.run(command, cwd=folder, timeout=400, env=environment).returncode == code
    tables = rayfed.read_results(folder / "results", "e")
    assert tables.trials["status"].tolist() == ["done"]
    return tables


def accuracies(tables):
    """The mean test accuracy of each round."""
    scores = tables.metrics.query("metric == 'accuracy' and split == 'test' and point == 'global'")
    return scores.groupby("round")["value"].mean().to_dict()


@pytest.mark.slow
def test_mlflow_has_every_step_once(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    tables = killed_and_resumed("mlflow", f"file://{tmp_path}/mlruns", tmp_path)
    client = mlflow.MlflowClient(f"file://{tmp_path}/mlruns")
    (run,) = client.search_runs([client.get_experiment_by_name("e").experiment_id])
    assert (run.info.status, run.info.run_name) == ("FINISHED", tables.trials["trial"].item())
    assert run.data.params["algorithm.name"] == "fedavg"
    history = client.get_metric_history(run.info.run_id, "global/test/accuracy")
    assert {metric.step: metric.value for metric in history} == pytest.approx(accuracies(tables))
    steps = [metric.step for metric in client.get_metric_history(run.info.run_id, "round/bytes_up")]
    assert steps == tables.rounds["round"].tolist()


@pytest.mark.slow
def test_wandb_has_every_step_once(tmp_path):
    pytest.importorskip("wandb")
    tables = killed_and_resumed("wandb", "project", tmp_path)
    (file,) = tmp_path.rglob("*.wandb")  # W&B had not written all that the killed process gave it
    steps, ids, found = Counter(), set(), {}
    for record in records_of(file):
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
        if record.WhichOneof("record_type") == "history":
            values = {"/".join(item.nested_key) or item.key: item.value_json for item in record.history.item}
            step = int(values["_step"])
            steps[step] += 1
            if "global/test/accuracy" in values:
                found[step] = float(values["global/test/accuracy"])
    (state,) = tmp_path.rglob("rayfed.json")
    assert ids == {json.loads(state.read_text())["id"]}
    assert steps == Counter(tables.rounds["round"].tolist())
    assert found == pytest.approx(accuracies(tables))


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


def test_a_tracker_that_says_what_it_holds_is_given_what_it_lacks(own):
    """Rounds 1 to 4 are in the tables when the trial goes on after the fourth."""
    asked = []

    def recorded(trial, first, last):
        asked.append((trial, first, last))
        return [(round, {"x": float(round)}) for round in range(first, last + 1)]

    trackers = Trackers([], recorded=recorded)
    chosen = VALUES | {"tracking": {"trackers": [own]}}
    trackers.begin("a", chosen, 4)  # before the class has `holds`
    trackers.record("a", 5, {"x": 5.0})
    trackers.end("a", "lost")
    trackers.failures()  # waits
    kind = sys.modules["mine_tracker"].Mine
    assert asked == []
    assert kind.calls == [("begin", "a", 4), ("a", 5, {"x": 5.0}), ("end", "a", "lost")]
    kind.calls.clear()
    kind.holds = lambda tracker, trial: 2
    trackers = Trackers([], recorded=recorded)
    trackers.begin("a", chosen, 4)
    trackers.begin("left out", VALUES | {"tracking": {"trackers": []}}, 4)
    trackers.record("a", 5, {"x": 5.0})
    trackers.begin("anew", chosen, None)
    trackers.failures()
    assert asked == [("a", 3, 4)]
    rounds = [("a", number, {"x": float(number)}) for number in (3, 4, 5)]
    assert kind.calls == [("begin", "a", 4), *rounds, ("begin", "anew", None)]


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
