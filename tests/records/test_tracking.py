"""Experiment trackers: their names and values, the true rounds, going on after a checkpoint, and failing alone."""

import shutil
import time
from pathlib import Path

import pytest

import rayfed
from rayfed.core.errors import UsageError
from rayfed.core.records import SERVER, Record, Score
from rayfed.records.storage import open_storage
from rayfed.records.tracking import Feed, check_trackers, round_values

NONE = {"tensorboard": None, "wandb": None, "folder": None}
QUICK = {
    "data": {"domains": ["plain", "font"], "per_domain": 60},
    "model": {"name": "mlp", "hidden": [8]},
    "local": {"batch_size": 8, "lr": 0.1},
    "rounds": 4,
    "evaluate.every": 2,
}


def logged_records(content):
    """Yield the records of W&B's offline file: LevelDB's log format after a header of 7 bytes."""
    block, at, parts = 32768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:  # too little is left of a block for another record
            at += block - at % block
            continue
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""


def score(client, domain, value, split="test", **more):
    given = {"metric": "accuracy", "point": "global", "n": 1} | more
    return Score(client=client, domain=domain, split=split, value=value, higher_is_better=True, **given)


def record(round=3, scores=(), **more):
    return Record(stage="round", round=round, cohort=2, scores=list(scores), **more)


def scalars(folder):
    """Read TensorBoard's event files back: by name, the value of each step."""
    from tensorboardX.proto.event_pb2 import Event

    values = {}
    for file in sorted(Path(folder).glob("events.*")):
        content, at = file.read_bytes(), 0
        while at < len(content):  # records of a length (8 bytes), its checksum (4), the event, and its checksum (4)
            length = int.from_bytes(content[at : at + 8], "little")
            event = Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == 1:  # START: what comes at this step or later replaces what was there
                for steps in values.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    values.setdefault(value.tag, {})[event.step] = value.simple_value
    return values


class TestRoundValues:
    def test_means_over_clients_and_domains(self):
        clients = [score(0, "a", 0.2), score(1, "a", 0.4), score(2, "b", 0.9)]
        values = round_values(record(scores=[*clients, score(SERVER, "c", 0.0)]))
        assert values["global/test/accuracy"] == pytest.approx(0.5)
        assert values["global/test/accuracy.a"] == pytest.approx(0.3)
        assert values["global/test/accuracy.b"] == 0.9
        assert "global/test/accuracy.c" not in values  # the server's own test set, where clients have one
        values = round_values(record(scores=[score(k, f"d{k}", 1.0) for k in range(21)]))
        assert [name for name in values if not name.startswith("round/")] == ["global/test/accuracy"]

    def test_the_server_where_no_client_has_the_split_and_unseen_clients_apart(self):
        scores = [score(0, "a", 1.0), score(SERVER, "b", 0.5, split="ood"), score(1, "a", 0.0, unseen=True)]
        values = round_values(record(scores=scores))
        means = {"global/test/accuracy": 1.0, "global/ood/accuracy": 0.5, "unseen/global/test/accuracy": 0.0}
        assert means.items() <= values.items()


class TestTensorBoard:
    def test_true_rounds_of_a_single_run(self, tmp_path):
        result = rayfed.run(QUICK | {"results": str(tmp_path), "tracking.tensorboard": True})
        found = scalars(tmp_path / "run" / "tensorboard" / result.trial)
        rows = result.metrics.query("metric == 'accuracy' and split == 'test'").groupby("round")["value"].mean()
        assert found["global/test/accuracy"] == pytest.approx(rows.to_dict())
        assert sorted(found["global/test/accuracy"]) == [2, 4]
        assert sorted(found["round/seconds/train"]) == [1, 2, 3, 4]
        assert set(found) > {"global/val/accuracy.font", "round/bytes_up", "trained/train/loss"}

    def test_rounds_that_are_repeated_are_replaced(self, tmp_path):
        def told(done, rounds, value):
            feed = Feed(open_storage(tmp_path), "e", tmp_path)
            feed.begin("t", {"tracking": NONE | {"tensorboard": True}, "seed": 0}, done)
            for number in rounds:
                feed.record("t", record(number, [score(0, "a", value)]))
            feed.end("t", "interrupted", None)
            assert feed.close() == []

        told(None, [1, 2, 3], 0.25)
        time.sleep(1.1)  # the names of event files have seconds
        told(2, [3, 4], 0.5)
        assert scalars(tmp_path / "tensorboard" / "t")["global/test/accuracy"] == {1: 0.25, 2: 0.25, 3: 0.5, 4: 0.5}
        told(None, [1], 0.75)
        assert scalars(tmp_path / "tensorboard" / "t")["global/test/accuracy"] == {1: 0.75}

    def test_only_sweeps_write_it_unless_asked_and_another_folder_can_be_given(self, tmp_path):
        cases = ((False, {}, None), (True, {}, "r"), (True, {"tensorboard": False}, None))
        for in_sweep, wanted, written in (*cases, (False, {"tensorboard": True, "folder": "boards"}, "boards")):
            feed = Feed(open_storage(tmp_path / "r"), "e", tmp_path, in_sweep=in_sweep)
            feed.begin("t", {"tracking": NONE | wanted}, None)
            feed.end("t", "done", None)
            feed.close()
            assert [path.parent.parent.name for path in tmp_path.glob("*/tensorboard/t")] == [written] * bool(written)
            shutil.rmtree(tmp_path / (written or "r"), ignore_errors=True)


class Failing:
    def __init__(self, where):
        self.where, self.calls = where, []

    def _call(self, name):
        self.calls.append(name)
        if name == self.where:
            raise ConnectionError("no network\nmore")

    def begin(self, about):
        self._call("begin")

    def log(self, round, values):
        self._call("log")

    def end(self, status, error):
        self._call("end")


class TestFailures:
    @pytest.mark.parametrize(("where", "calls"), [("begin", 1), ("log", 2), ("end", 4)])
    def test_a_tracker_that_fails_is_left_out_and_reported_once(self, tmp_path, monkeypatch, where, calls):
        tracker, other = Failing(where), Failing(None)
        monkeypatch.setattr(Feed, "_of_options", lambda self, values: {"wandb": tracker, "other": other})
        feed = Feed(open_storage(tmp_path), "e", tmp_path)
        feed.begin("t", {}, None)
        for number in (1, 2):
            feed.record("t", record(number))
        feed.end("t", "done", None)
        (line,) = feed.close()
        assert line == "t: tracking.wandb failed (ConnectionError: no network); the trial went on without it"
        assert len(tracker.calls) == calls
        assert other.calls == ["begin", "log", "log", "end"]

    def test_one_that_hangs_is_not_waited_for(self, tmp_path, monkeypatch):
        class Hanging(Failing):
            def log(self, round, values):
                time.sleep(2)

        monkeypatch.setattr(Feed, "_of_options", lambda self, values: {"wandb": Hanging(None)})
        feed = Feed(open_storage(tmp_path), "e", tmp_path)
        began = time.monotonic()
        feed.begin("t", {}, None)
        feed.record("t", record())
        feed.end("t", "done", None)
        assert time.monotonic() - began < 0.5
        assert "did not finish within 0.1 s" in feed.close(0.1)[0]


class TestRefusals:
    def test_a_missing_package_is_said_before_anything_starts(self, tmp_path, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        for start in (rayfed.run, rayfed.sweep):
            with pytest.raises(UsageError, match=r"^tracking.wandb=x: the package wandb is not installed"):
                start({"results": str(tmp_path / "r"), "tracking.wandb": "x"})
        assert not (tmp_path / "r").exists()


def test_trackers_change_no_name_of_a_trial(tmp_path):
    from rayfed.experiments.config import Config
    from rayfed.experiments.plan import trial_name

    assert trial_name(Config.read({})) == trial_name(Config.read({"tracking": {"wandb": "x", "tensorboard": True}}))


@pytest.mark.slow
class TestWeightsAndBiases:
    def test_rounds_and_values_offline(self, tmp_path, monkeypatch):
        pytest.importorskip("wandb")
        from wandb.proto import wandb_internal_pb2

        monkeypatch.setenv("WANDB_MODE", "offline")
        result = rayfed.run(QUICK | {"results": str(tmp_path), "tracking.wandb": "project"})
        (file,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
        rows, runs = [], []
        for content in logged_records(file.read_bytes()):
            kept = wandb_internal_pb2.Record.FromString(content)
            if kept.WhichOneof("record_type") == "history":
                rows.append({"/".join(i.nested_key) or i.key: i.value_json for i in kept.history.item})
            elif kept.WhichOneof("record_type") == "run":
                runs.append(kept.run)
        assert (runs[0].project, runs[0].run_group, runs[0].display_name) == ("project", "run", result.trial)
        assert [int(row["round"]) for row in rows] == [1, 2, 3, 4]
        expected = result.metrics.query("metric == 'accuracy' and split == 'test'").groupby("round")["value"].mean()
        found = {int(row["round"]): float(row["global/test/accuracy"]) for row in rows if "global/test/accuracy" in row}
        assert found == pytest.approx(expected.to_dict())
        assert (tmp_path / "run" / "wandb" / f"{result.trial}.id").read_text() == runs[0].run_id

    def test_not_logged_in(self, monkeypatch, tmp_path):
        pytest.importorskip("wandb")
        for name in ("WANDB_API_KEY", "WANDB_MODE"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
        with pytest.raises(UsageError, match=r"^tracking.wandb=x: not logged in .* run wandb login"):
            check_trackers(NONE | {"wandb": "x"}, "results")


@pytest.mark.slow
@pytest.mark.ray
class TestOnRay:
    def test_a_sweep_of_several_processes(self, tmp_path, monkeypatch):
        """The recorder is an actor there, and two trials at a time log to it."""
        pytest.importorskip("wandb")
        from helpers.ray_session import start_ray

        start_ray()  # before the variable is set: the recorder gets those of the command, not those of Ray's start
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.chdir(tmp_path)
        swept = rayfed.sweep(QUICK | {"experiment": "s", "seeds": [0, 1], "tracking.wandb": "project"})
        assert swept.failed == 0
        for trial in swept.trials["trial"]:
            found = scalars(tmp_path / "results" / "s" / "tensorboard" / trial)
            assert sorted(found["global/val/accuracy"]) == [2, 4]
        assert len(list(tmp_path.glob("results/s/wandb/offline-run-*"))) == 2
