"""TensorBoard: names and values, the true rounds, going on after a checkpoint, and failing alone."""

import shutil
from pathlib import Path

import pytest

import rayfed
from helpers.commands import TWO_CLIENTS
from rayfed.core.round_record import SERVER, Record, Score
from rayfed.records.round_report import RoundReport
from rayfed.records.storage import open_storage
from rayfed.records.tracking import TensorBoard, Trackers

NONE = {"tensorboard": None, "folder": None}
QUICK = TWO_CLIENTS | {"rounds": 4, "evaluate.every": 2}


def score(client, domain, value, split="test", **more):
    given = {"metric": "accuracy", "point": "global", "n": 1} | more
    return Score(client=client, domain=domain, split=split, value=value, higher_is_better=True, **given)


def record(round=3, scores=(), **more):
    return Record(stage="round", round=round, cohort=2, scores=list(scores), **more)


def round_values(record):
    return RoundReport.of(record).values


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
            trackers = Trackers([TensorBoard(open_storage(tmp_path), tmp_path)])
            trackers.begin("t", {"tracking": NONE | {"tensorboard": True}, "seed": 0}, done)
            for number in rounds:
                trackers.record("t", number, round_values(record(number, [score(0, "a", value)])))
            trackers.end("t", "interrupted")
            assert trackers.failures() == []

        told(None, [1, 2, 3], 0.25)
        told(2, [3, 4], 0.5)
        assert scalars(tmp_path / "tensorboard" / "t")["global/test/accuracy"] == {1: 0.25, 2: 0.25, 3: 0.5, 4: 0.5}
        told(None, [1], 0.75)
        assert scalars(tmp_path / "tensorboard" / "t")["global/test/accuracy"] == {1: 0.75}

    def test_only_sweeps_write_it_unless_asked_and_another_folder_can_be_given(self, tmp_path):
        cases = ((False, {}, None), (True, {}, "r"), (True, {"tensorboard": False}, None))
        for in_sweep, wanted, written in (*cases, (False, {"tensorboard": True, "folder": "boards"}, "boards")):
            board = TensorBoard(open_storage(tmp_path / "r"), tmp_path, in_sweep=in_sweep)
            board.begin("t", {"tracking": NONE | wanted}, None)
            board.end("t", "done")
            assert [path.parent.parent.name for path in tmp_path.glob("*/tensorboard/t")] == [written] * bool(written)
            shutil.rmtree(tmp_path / (written or "r"), ignore_errors=True)

    def test_a_folder_that_cannot_be_written_is_reported_once_and_ends_nothing(self, tmp_path):
        (tmp_path / "file").touch()
        trackers = Trackers([TensorBoard(open_storage(tmp_path), tmp_path)])
        for trial in ("t", "u"):
            trackers.begin(trial, {"tracking": {"tensorboard": True, "folder": "file"}}, None)
            trackers.record(trial, 3, round_values(record()))
            trackers.end(trial, "done")
        (line,) = trackers.failures()
        assert line.startswith("t (and 1 more): tracking.tensorboard failed (NotADirectoryError: ")
        assert line.endswith("; the trial went on without it")
