"""Early stopping: the rule by hand, what ends with it, resuming, and what is said about it."""

import math

import pandas as pd
import pytest

import rayfed
from helpers.commands import TWO_CLIENTS, command
from rayfed.core.round_record import SERVER, Record, Score, Selection
from rayfed.engine.evaluation import EarlyStopping, StopRule
from rayfed.engine.host import LocalFleet
from rayfed.experiments.config import Config
from rayfed.experiments.plan import make_plan
from rayfed.experiments.simulation import Simulation, resume_message
from rayfed.records.recorder import Recorder

QUICK = TWO_CLIENTS | {"rounds": 12}

OF_LOSS = StopRule(patience=2, selection=Selection(metric="loss", higher_is_better=False))


def record(round, value, metric="accuracy", **more):
    given = {"client": 0, "split": "val", "point": "global", "n": 1} | more
    given["higher_is_better"] = metric != "loss"
    scores = [Score(domain="a", metric=metric, value=v, **given) for v in ([] if value is None else [value])]
    return Record(stage="round", round=round, cohort=1, scores=scores)


def stopped_after(rule, values):
    """Return the position of the value at which the rule stops, counted from 1; None if it does not."""
    stopping = EarlyStopping(rule)
    for round, value in enumerate(values, 1):
        stopping.update(record(round, value, rule.selection.metric))
        if stopping.reason is not None:
            return round
    return None


class TestRule:
    @pytest.mark.parametrize(
        ("rule", "values", "stop"),
        [
            (StopRule(patience=1), [0.5, 0.6, 0.6], 3),  # a tie is no improvement
            (StopRule(patience=2), [0.5, 0.4, 0.6, 0.5, 0.5], 5),  # 0.6 starts the count anew
            (StopRule(patience=2), [0.5, 0.4, 0.6, 0.5], None),
            (StopRule(patience=2, min_delta=0.1), [0.5, 0.55, 0.59, 0.9], 3),  # the best stays 0.5
            (StopRule(patience=2, min_delta=0.1), [0.5, 0.55, 0.65, 0.7, 0.7], 5),  # 0.65 is better by more than 0.1
            (StopRule(patience=3), [0.5, None, 0.4, None, 0.4, None, 0.4], 7),  # rounds without scores do not count
            (StopRule(patience=1), [0.9], None),
            (OF_LOSS, [2.0, 1.0, 1.5, 1.0], 4),
            (OF_LOSS, [2.0, 1.9, 1.8, 1.7], None),
            (OF_LOSS, [2.0, math.inf, math.nan], 3),  # what is not finite is no improvement
            (OF_LOSS, [math.nan, math.inf], 2),
            (OF_LOSS, [math.nan, 2.0, math.nan, 1.0, 1.5], None),
        ],
    )
    def test_by_hand(self, rule, values, stop):
        assert stopped_after(rule, values) == stop

    def test_the_reason(self):
        stopping = EarlyStopping(StopRule(patience=2, min_delta=0.01))
        for round, value in ((3, 0.5), (6, 0.4), (9, 0.3)):
            stopping.update(record(round, value))
        assert stopping.reason == (
            "validation accuracy (global) has not improved on 0.5 of round 3 by more than 0.01 for 2 evaluations"
        )

    @pytest.mark.parametrize("of_others", [{"split": "test"}, {"point": "trained"}, {"unseen": True}])
    def test_other_scores_play_no_part(self, of_others):
        assert Selection().score(record(1, 0.5, **of_others)) is None

    def test_the_score_is_the_mean_over_participants(self):
        parts = [record(1, v, client=k, n=n) for k, v, n in ((0, 0.2, 90), (1, 0.8, 10), (SERVER, 0.0, 5))]
        scores = [score for part in parts for score in part.scores]
        assert Selection().score(Record(stage="round", round=1, cohort=2, scores=scores)) == pytest.approx(0.5)

    def test_going_on_from_a_saved_state(self):
        values = [0.5, 0.4, 0.6, 0.5, 0.55]
        for cut in range(len(values)):
            first, second = (EarlyStopping(StopRule(patience=2)) for _ in range(2))
            for round, value in enumerate(values[:cut], 1):
                first.update(record(round, value))
            second.restore(first.state())
            for round, value in enumerate(values[cut:], cut + 1):
                second.update(record(round, value))
            assert second.reason is not None
            assert "0.6 of round 3" in second.reason


@pytest.fixture
def scripted(monkeypatch):
    """The score of round r is the r-th of these: the best is round 3, so that patience 2 stops after round 5."""
    values = dict(enumerate([0.1, 0.2, 0.5, 0.3, 0.3, 0.9], 1))
    monkeypatch.setattr(Selection, "score", lambda rule, record: values.get(record.round))


STOPPING = QUICK | {"early_stopping.patience": 2}


@pytest.mark.usefixtures("scripted")
class TestTrial:
    def test_it_is_done_and_says_why(self, here, capsys):
        result = rayfed.run(STOPPING, quiet=False)
        assert "stopped early: validation accuracy (global) has not improved on 0.5" in capsys.readouterr().err
        assert result.rounds["round"].tolist() == [1, 2, 3, 4, 5]
        (row,) = rayfed.read_results("results").trials.to_dict("records")
        assert (row["status"], row["rounds_done"]) == ("done", 5)
        assert row["stop_reason"].endswith("not improved on 0.5 of round 3 by more than 0 for 2 evaluations")
        command("report")(["results"])
        assert f"{result.trial} stopped early, after round 5 of 12: validation accuracy" in capsys.readouterr().out
        whole = rayfed.run(QUICK | {"results": "whole"}).metrics.query("round <= 5")
        assert result.metrics["value"].tolist() == whole["value"].tolist()

    def test_patience_that_ends_with_the_last_round_stops_nothing(self, here, capsys):
        rayfed.run(STOPPING | {"rounds": 5}, quiet=False)
        assert "early stopping: all rounds ran" in capsys.readouterr().err
        (row,) = rayfed.read_results("results").trials.to_dict("records")
        assert (row["status"], row["rounds_done"]) == ("done", 5)
        assert pd.isna(row["stop_reason"])

    def test_a_resumed_trial_stops_where_it_would_have(self, tmp_path):
        whole = rayfed.run(STOPPING | {"results": str(tmp_path / "whole")})
        values = STOPPING | {"results": str(tmp_path), "checkpoint.every": 1}
        plan = make_plan(Config.read(values))
        recorder = Recorder(str(tmp_path), "run")
        simulation = Simulation(plan, recorder, lambda: LocalFleet(plan.blueprint, plan.population), "cpu")
        with simulation.global_settings():
            rounds = iter(simulation)
            for _ in range(4):  # one of the two evaluations without an improvement
                next(rounds)
        recorder.close()
        saved = Recorder(str(tmp_path), "run").saved(plan.trial)
        assert resume_message(plan.config, saved) == "continues after round 4"
        again = rayfed.run(values | {"resume": True})
        assert again.rounds["round"].max() == 5
        assert again.weights_hash == whole.weights_hash
        saved = Recorder(str(tmp_path), "run").saved(plan.trial)
        assert resume_message(plan.config, saved) == "already finished: nothing to do"
        assert rayfed.run(values | {"resume": True}).weights_hash == whole.weights_hash

    def test_what_is_scored_at_the_end_is_scored(self, tmp_path):
        more = {"unseen_clients": 1, "partition": {"name": "iid", "clients": 3}, "metrics.ece": {"every": None}}
        given = STOPPING | more | {"results": str(tmp_path), "checkpoint.every": 1}
        result = rayfed.run(given)
        metrics = result.metrics
        assert set(metrics.query("unseen")["round"]) == {5}
        assert set(metrics.query("metric == 'ece' and not unseen")["round"]) == {5}
        keys = ["round", "client", "split", "point", "metric"]
        assert not metrics.duplicated(keys).any()
        assert rayfed.run(given | {"resume": True}).weights_hash == result.weights_hash

    def test_the_final_stage_follows(self, tmp_path):
        given = STOPPING | {"results": str(tmp_path), "algorithm.name": "fedbabu", "checkpoint.every": 1}
        result = rayfed.run(given)
        assert result.rounds["round"].tolist() == [1, 2, 3, 4, 5, 13]
        assert result.rounds["stage"].tolist()[-1] == "final"
        assert result.trials["rounds_done"].tolist() == [5]
        assert "stopped early, after round 5 of 12: " in result.report()
        assert rayfed.run(given | {"resume": True}).weights_hash == result.weights_hash

    def test_in_a_sweep_it_counts_as_done(self, tmp_path, monkeypatch):
        given = STOPPING | {"results": str(tmp_path), "seeds": [0, 1], "search": {"max_concurrent": 1}}
        swept = rayfed.sweep(given)
        assert swept.failed == 0
        assert swept.trials["rounds_done"].tolist() == [5, 5]
        monkeypatch.setattr(Selection, "score", lambda rule, record: 1 / 0)
        assert rayfed.sweep(given | {"resume": True}).failed == 0  # nothing runs again
