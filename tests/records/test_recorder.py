"""The recorder: rows of many trials that wait and are written together, trials that end early, progress, and means."""

import math

import numpy as np
import pandas as pd
import pytest

from rayfed.core.errors import StorageError
from rayfed.core.round_record import SERVER, Record, Score
from rayfed.experiments.config import Config
from rayfed.records import recorder as recorder_module
from rayfed.records.recorder import Recorder
from rayfed.records.round_report import RoundReport
from rayfed.records.storage import Storage
from rayfed.records.trials import read_trials
from rayfed.records.writer import ExperimentFiles, TrialWriter, WritingBudget

VALUES = Config.read({"tracking.tensorboard": False}).tree() | {"default_eval_point": "global"}


def score(client, value, split="val", domain="a", **more):
    given = {"metric": "accuracy", "point": "global", "n": 10} | more
    return Score(client=client, domain=domain, split=split, value=value, higher_is_better=True, **given)


def record(number, values=(0.5, 0.5), **more):
    scores = [score(client, value) for client, value in enumerate(values)]
    return Record(stage="round", round=number, cohort=len(values), scores=scores, **more)


def begun(recorder, *trials, rounds=10, keep=None):
    for trial in trials:
        recorder.begin(trial, VALUES, rounds, keep)
    return recorder


def rounds_on_disk(folder, trial="t"):
    files = sorted((folder / "e" / "rounds").glob(f"{trial}-*.parquet"))
    return [round for file in files for round in pd.read_parquet(file)["round"]]


@pytest.fixture
def late(monkeypatch):
    """Let writing have used up its share of the time."""
    monkeypatch.setattr(WritingBudget, "is_spent", property(lambda budget: True))


class TestWaitingRows:
    def test_writing_may_take_its_share_of_the_time(self):
        seconds = [0.0]
        budget = WritingBudget(0.02, clock=lambda: seconds[0])
        assert not budget.is_spent
        with budget.spending():
            seconds[0] += 1.0
        seconds[0] = 49.9
        assert budget.is_spent
        seconds[0] = 50.1
        assert not budget.is_spent

    def test_the_rows_of_all_trials_are_written_together(self, tmp_path, monkeypatch):
        spent = iter([False, True, True, False])
        monkeypatch.setattr(WritingBudget, "is_spent", property(lambda budget: next(spent)))
        recorder = begun(Recorder(str(tmp_path), "e"), "t", "u")
        written = []
        for trial, number in (("t", 1), ("t", 2), ("u", 1), ("t", 3)):
            recorder.record(trial, record(number))
            written.append((rounds_on_disk(tmp_path, "t"), rounds_on_disk(tmp_path, "u")))
        assert written == [([1], []), ([1], []), ([1], []), ([1, 2, 3], [1])]
        recorder.end("t", {"status": "done"})
        assert rounds_on_disk(tmp_path, "t") == [1, 2, 3]

    def test_what_waits_is_bounded(self, tmp_path, late, monkeypatch):
        monkeypatch.setattr(recorder_module, "MOST_WAITING_BYTES", 50_000)
        recorder = begun(Recorder(str(tmp_path), "e"), "t", "u")
        most = 0
        for number in range(1, 41):
            for trial in ("t", "u"):
                recorder.record(trial, record(number))
                waiting = sum(recorder._writer(name).waiting_bytes for name in ("t", "u"))
                assert waiting == recorder._waiting_bytes
                most = max(most, waiting)
        assert 40_000 < most <= 50_000
        assert len(rounds_on_disk(tmp_path, "t")) == len(rounds_on_disk(tmp_path, "u")) > 30

    def test_a_checkpoint_writes_the_rows_of_its_trial_before(self, tmp_path, late):
        recorder = begun(Recorder(str(tmp_path), "e"), "t", "u")
        for trial in ("t", "u"):
            recorder.record(trial, record(1))
        recorder.begin_checkpoint("t")
        assert (rounds_on_disk(tmp_path, "t"), rounds_on_disk(tmp_path, "u")) == ([1], [])

    def test_a_file_that_cannot_be_written_ends_its_own_trial_alone(self, tmp_path, late, monkeypatch):
        recorder = begun(Recorder(str(tmp_path), "e"), "t", "u")
        recorder.record("t", record(1))
        monkeypatch.undo()
        write = Storage.write

        def fails_for_t(self, name, content):
            if name.startswith("t-"):
                raise OSError(28, "No space left on device")
            write(self, name, content)

        monkeypatch.setattr(Storage, "write", fails_for_t)
        recorder.record("u", record(1))
        assert rounds_on_disk(tmp_path, "u") == [1]
        with pytest.raises(StorageError, match=r"results in .*/e: No space left on device"):
            recorder.record("t", record(2))
        monkeypatch.undo()
        recorder.end("t", {"status": "failed"})
        assert rounds_on_disk(tmp_path, "t") == [1, 2]

    def test_files_of_few_rows_grow_and_large_ones_stay(self, tmp_path, late, monkeypatch):
        recorder = begun(Recorder(str(tmp_path), "e"), "t")
        recorder._files.metrics._segment_rows = 7
        sizes = []
        for number in range(1, 7):
            recorder.record("t", record(number))
            recorder.begin_checkpoint("t")
            files = sorted((tmp_path / "e" / "metrics").glob("t-*.parquet"))
            sizes.append([len(pd.read_parquet(file)) for file in files])
        assert sizes == [[2], [4], [6], [6, 2], [6, 4], [6, 6]]

    def test_resumed_rows_follow_those_through_the_checkpoint(self, tmp_path, late):
        recorder = begun(Recorder(str(tmp_path), "e"), "t")
        for number in range(1, 6):
            recorder.record("t", record(number))
        recorder.end("t", {"status": "interrupted"})
        again = begun(Recorder(str(tmp_path), "e"), "t", keep=3)
        assert rounds_on_disk(tmp_path) == [1, 2, 3]
        again.record("t", record(4, values=(0.75, 0.25)))
        again.end("t", {"status": "done"})
        assert rounds_on_disk(tmp_path) == [1, 2, 3, 4]
        metrics = pd.read_parquet(tmp_path / "e" / "metrics")
        assert metrics.groupby("round")["value"].apply(list).to_dict()[4] == [0.75, 0.25]


class TestEnds:
    def test_an_end_waits_for_the_rounds_before_it(self, tmp_path):
        recorder = begun(Recorder(str(tmp_path), "e"), "t")
        recorder.record("t", record(1))
        recorder.end("t", {"status": "stopped"}, after_round=3)
        assert [progress.status for progress in recorder.progress()] == ["stopped"]
        for number in (2, 3, 4):  # the process of the trial had gone on to round 4
            recorder.record("t", record(number))
        (row,) = pd.read_parquet(tmp_path / "e" / "rounds").groupby("trial")["round"].apply(list)
        assert row == [1, 2, 3]
        recorder.close()
        (row,) = read_trials(recorder._home.child("trials"))
        assert (row["status"], row["rounds_done"]) == ("stopped", 3)

    def test_rounds_that_never_arrive_do_not_hold_the_end(self, tmp_path):
        recorder = begun(Recorder(str(tmp_path), "e"), "t")
        recorder.record("t", record(1))
        recorder.end("t", {"status": "stopped"}, after_round=3)
        recorder.close()
        (row,) = read_trials(recorder._home.child("trials"))
        assert (row["status"], row["rounds_done"]) == ("stopped", 1)


def test_progress_is_asked_for_what_has_changed(tmp_path):
    recorder = begun(Recorder(str(tmp_path), "e"), "t", "u")
    last, changed = recorder.changed_progress(0)
    assert [progress.trial for progress in changed] == ["t", "u"]
    assert recorder.changed_progress(last) == (last, [])
    recorder.record("u", record(1, values=(0.25, 0.75)))
    then, changed = recorder.changed_progress(last)
    assert [(progress.trial, progress.round, progress.val) for progress in changed] == [("u", 1, 0.5)]
    recorder.lost("t", "its node died")
    recorder.doing("u", "scoring")
    assert [progress.trial for progress in recorder.changed_progress(then)[1]] == ["t", "u"]


def test_the_best_value_is_the_lowest_where_lower_is_better_and_none_again_after_a_start_anew(tmp_path):
    recorder = Recorder(str(tmp_path), "e")
    values = VALUES | {"selection_metric": "accuracy", "selection_mode": "min"}
    recorder.begin("t", values, 10, None)
    for number, value in enumerate((0.5, 0.25, math.nan, 0.75), start=1):
        recorder.record("t", record(number, values=(value,)))
    (progress,) = recorder.progress()
    assert (progress.val, progress.best_val) == (0.75, 0.25)
    recorder.lost("t", "its node died")
    recorder.begin("t", values, 10, None)
    (progress,) = recorder.progress()
    assert (progress.best_val, progress.lost, progress.round) == (None, 1, 0)


def test_a_restart_counts_the_work_since_the_last_checkpoint_but_one(tmp_path):
    recorder = begun(Recorder(str(tmp_path), "e"), "t")
    for number in range(1, 8):
        recorder.record("t", record(number))
        if number in (2, 5):
            recorder._trials["t"].progress.saved(number)
    recorder.lost("t", "its node died")
    recorder.begin("t", VALUES, 10, 2)  # the newest checkpoint was damaged
    event = pd.read_parquet(tmp_path / "e" / "events").iloc[0]
    assert (event["redone"], event["round"]) == (2 * 5, 7)


class TestMeans:
    def test_values_that_are_not_defined_do_not_count(self):
        values = RoundReport.of(record(1, values=(0.25, math.nan, 0.75))).values
        assert values["global/val/accuracy"] == 0.5
        assert math.isnan(RoundReport.of(record(1, values=(math.nan,))).values["global/val/accuracy"])

    def test_a_round_without_scores_has_its_costs(self):
        report = RoundReport.of(Record(stage="round", round=1, cohort=7))
        assert report.values["round/clients"] == 7
        assert report.mean("global", "val", "accuracy") is None

    def test_they_are_those_of_the_record(self):
        scores = [score(client, client / 7, domain=f"d{client % 3}") for client in range(11)]
        scores += [score(SERVER, 0.125, domain="left out"), score(SERVER, 0.25, split="ood")]
        scores += [score(20, 1.0, unseen=True), score(21, 0.5, metric="loss")]
        of_round = Record(stage="round", round=1, cohort=2, scores=scores)
        report = RoundReport.of(of_round)
        for metric in ("accuracy", "loss"):
            expected = of_round.means(metric, "global")
            found = {split: report.mean("global", split, metric) for split in expected}
            assert found == pytest.approx(expected)
        assert report.values["global/val/accuracy.d1"] == pytest.approx((1 + 4 + 7 + 10) / 7 / 4)
        assert report.values["unseen/global/val/accuracy"] == 1.0


def test_a_thousand_trials_begin_without_a_list_of_all_files_for_each(tmp_path, monkeypatch):
    calls = []
    files = Storage.files
    monkeypatch.setattr(Storage, "files", lambda self: calls.append(self.path) or files(self))
    recorder = Recorder(str(tmp_path), "e")
    for number in range(5):
        begun(recorder, f"t{number}")
    for table in ("metrics", "rounds", "events"):
        assert sum(path.endswith(f"/e/{table}") for path in calls) == 1


def test_the_tables_give_back_what_trackers_were_given(tmp_path):
    """Rounds with a test set of the server, unseen clients, missing values, domains and costs; in two files."""
    reports = []
    for number in range(4):
        scores = [score(client, client / 7 + number / 3, domain="ab"[client % 2]) for client in range(5)]
        scores.append(score(SERVER, 0.1 * number, split="test", domain="server"))
        scores.append(score(7, math.nan, metric="loss"))
        scores.append(score(8, number / 9, split="test", unseen=True))
        one = Record(stage="round", round=number, cohort=5, scores=scores, bytes_up={"weights": 7}, busy=[1.0, 2.0])
        one.seconds["total"], one.epsilon = 0.3, 0.1 * number
        reports.append(RoundReport.of(one))
    reports.append(RoundReport.of(Record(stage="final", round=4, cohort=0)))
    files = ExperimentFiles(str(tmp_path), "e", segment_rows=17)
    writer = TrialWriter(files, "t", "fedavg", 0)
    for report in reports:
        writer.add(report)
        writer.flush()
    assert len(list((tmp_path / "e" / "metrics").glob("t-*.parquet"))) > 1
    found = list(ExperimentFiles(str(tmp_path), "e").values("t", 1, 4))
    assert [number for number, _ in found] == [1, 2, 3, 4]
    for number, values in found:
        np.testing.assert_equal(values, dict(reports[number].values))
    assert list(ExperimentFiles(str(tmp_path), "e").values("other", 0, 9)) == []


def test_equal_trials_of_one_tuner_have_names_of_their_own_and_a_later_tuner_takes_them_over(tmp_path):
    recorder = Recorder(str(tmp_path), "e")
    assert recorder.name_for("t", "a1_00000", None) == ("t", False)
    assert recorder.name_for("t", "a1_00000", None) == ("t", True)
    begun(recorder, "t")
    assert recorder.name_for("t", "b2_00000", None) == ("t-b2_00000", False)  # the first one has not ended
    recorder.end("t", {"status": "done"})
    assert recorder.name_for("t", "a1_00001", None) == ("t-a1_00001", False)  # also if it begins after the end
    assert recorder.name_for("t", "c3_00000", None) == ("t", False)
