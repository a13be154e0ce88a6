"""`rayfed.rounds` and `on_round`: a loop over rounds that its user holds."""

import random

import numpy as np
import pandas as pd
import pytest
import torch

import rayfed

QUICK = {"data.name": "mini_digits", "rounds": 4, "quiet": True, "cohort": 2}


@pytest.fixture
def values(tmp_path):
    return QUICK | {"results": str(tmp_path / "results")}


@pytest.fixture
def whole(tmp_path):
    return run(QUICK | {"results": str(tmp_path / "whole")})


def run(values, **more):
    return rayfed.run({key: value for key, value in values.items() if key != "quiet"}, quiet=True, **more)


def rounds_of(values, **more):
    return rayfed.rounds({key: value for key, value in values.items() if key != "quiet"}, quiet=True, **more)


class TestALoop:
    def test_ends_with_the_bits_of_a_run(self, values, whole):
        rounds = rounds_of(values)
        seen = list(rounds)
        result = rounds.result()
        assert [round.number for round in seen] == [1, 2, 3, 4]
        assert result.weights_hash == whole.weights_hash
        assert result.trial == whole.trial == rounds.trial
        assert result.trials["status"].tolist() == ["done"]
        pd.testing.assert_frame_equal(result.metrics, whole.metrics)

    def test_shows_what_the_tables_show(self, values):
        rounds = rounds_of(values)
        seen = list(rounds)
        tables = rounds.result()
        shown = pd.concat([round.metrics for round in seen], ignore_index=True)
        assert shown["value"].tolist() == tables.metrics["value"].tolist()
        assert shown.columns.tolist() == [name for name in tables.metrics.columns if name in shown.columns]
        for round, row in zip(seen, tables.rounds.to_dict("records"), strict=True):
            assert round.costs["bytes_up"] == row["bytes_up"]
            rows = tables.metrics.query(f"round == {round.number} and metric == 'accuracy' and split == 'test'")
            expected = rows[rows["point"] == "global"].query("client >= 0")["value"].mean()
            assert round.scores["test"] == pytest.approx(expected, abs=1e-12)
            assert round.values["global/test/accuracy"] == pytest.approx(expected, abs=1e-12)
            assert round.values["round/bytes_up"] == row["bytes_up"]

    def test_gives_the_model_of_the_round_and_of_no_other(self, values):
        models, servers = [], []
        first = None
        for round in rounds_of(values):
            first = first or round
            models.append(round.model().state_dict())
            servers.append(round.server["weights"])
        for name, value in servers[0].items():
            assert torch.equal(models[0][name], value)
        assert any(not torch.equal(models[0][name], models[1][name]) for name in models[0])
        with pytest.raises(rayfed.UsageError, match=r"round 1: its states are gone, since round 4 is done"):
            first.model()

    def test_changes_nothing_by_what_its_body_draws_or_sets(self, values, whole):
        torch.manual_seed(5)
        random.seed(5)
        expected = torch.rand(8).tolist()
        torch.manual_seed(5)
        drawn = []
        rounds = rounds_of(values)
        for round in rounds:
            drawn.append(torch.rand(1).item())
            random.seed(1)
            np.random.seed(1)
            round.model()
            for tensor in round.server["weights"].values():
                tensor.zero_()
        drawn += torch.rand(4).tolist()
        assert drawn == expected  # the body goes on with its own stream
        assert rounds.result().weights_hash == whole.weights_hash

    def test_may_alternate_with_another(self, tmp_path, whole):
        other = {"seed": 1, "placement.deterministic": False}
        alone = run(QUICK | other | {"results": str(tmp_path / "alone")})
        one = rounds_of(QUICK | {"results": str(tmp_path / "one")})
        two = rounds_of(QUICK | other | {"results": str(tmp_path / "two")})
        before = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
        for _ in zip(one, two, strict=True):
            assert (torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()) == before
        assert one.result().weights_hash == whole.weights_hash
        assert two.result().weights_hash == alone.weights_hash

    def test_that_is_left_goes_on(self, values, whole):
        for round in rounds_of(values):
            if round.number == 2:
                break
        (row,) = rayfed.read_results(values["results"]).trials.to_dict("records")
        assert (row["status"], row["rounds_done"]) == ("interrupted", 2)
        rest = rounds_of(values | {"resume": True})
        assert [round.number for round in rest] == [3, 4]
        result = rest.result()
        assert result.weights_hash == whole.weights_hash
        assert result.trials["status"].tolist() == ["done"]
        assert sorted(set(result.metrics["round"])) == [1, 2, 3, 4]

    def test_that_is_left_has_a_result(self, values):
        with rounds_of(values) as rounds:
            model = next(rounds).model()
        result = rounds.result()
        assert result.weights_hash == ""
        assert result.rounds["round"].tolist() == [1]
        for name, value in result.model().state_dict().items():
            assert torch.equal(value, model.state_dict()[name])

    def test_that_has_ended_gives_nothing_more(self, values):
        rounds = rounds_of(values, rounds=1)
        assert len(list(rounds)) == 1
        digest = rounds.result().weights_hash
        assert list(rounds) == []
        assert rounds.result().weights_hash == digest != ""

    def test_refuses_before_it_begins(self, values):
        with pytest.raises(rayfed.UsageError, match="cohort"):
            rounds_of(values | {"cohort": 9})

    def test_holds_its_trial(self, values):
        first, second = rounds_of(values), rounds_of(values)
        next(first)
        with pytest.raises(rayfed.UsageError, match="running"):
            next(second)
        first.close()


class TestOnRound:
    def test_is_called_with_each_round(self, values, whole):
        seen = []
        result = run(values, on_round=lambda round: seen.append((round.number, round.scores["test"])))
        assert [number for number, _ in seen] == [1, 2, 3, 4]
        assert result.weights_hash == whole.weights_hash

    def test_ends_the_run_by_an_error_which_is_recorded(self, values, whole):
        def fail(round):
            if round.number == 2:
                raise ValueError("enough")

        with pytest.raises(ValueError, match="enough"):
            run(values, on_round=fail, checkpoint={"every": 1})
        (row,) = rayfed.read_results(values["results"]).trials.to_dict("records")
        assert row["status"] == "failed"
        assert row["error"].startswith("ValueError: enough (")
        assert "in fail" in row["error"]
        again = run(values | {"resume": True}, checkpoint={"every": 1})
        assert again.weights_hash == whole.weights_hash

    def test_ends_the_run_by_an_interrupt(self, values, whole):
        def interrupt(round):
            if round.number == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt, match=r"interrupted after round 2"):
            run(values, on_round=interrupt)
        (row,) = rayfed.read_results(values["results"]).trials.to_dict("records")
        assert row["status"] == "interrupted"
        assert run(values | {"resume": True}).weights_hash == whole.weights_hash


@pytest.mark.slow
class TestOnRay:
    def test_hosts_train_the_same_bits(self, values, whole, tmp_path):
        """The server runs here, and clients in two processes of Ray."""
        from rayfed.distributed import cluster

        several = values | {"placement.hosts": 2, "placement.cpus": 0.5}
        rounds = rounds_of(several)
        numbers = [round.number for round in rounds]
        assert numbers == [1, 2, 3, 4]
        assert rounds.result().weights_hash == whole.weights_hash
        assert cluster.is_private()

    @pytest.mark.parametrize(("restarts", "status"), [(1, "done"), (0, "failed")])
    def test_a_host_that_dies_is_replaced_as_often_as_faults_say(self, values, whole, restarts, status):
        import os
        import signal

        from helpers.ray_processes import processes

        killed = []
        several = {"placement.hosts": 2, "placement.cpus": 0.5, "checkpoint.every": 1, "faults.restarts": restarts}
        rounds = rounds_of(values | several)
        numbers = []
        try:
            for round in rounds:
                numbers.append(round.number)
                if round.number == 2 and not killed:
                    killed = processes("RayHost")[:1]
                    os.kill(killed[0], signal.SIGKILL)
        except rayfed.HostLost:
            assert status == "failed"
        result = rounds.result()
        assert len(killed) == 1
        assert result.trials["status"].tolist() == [status]
        if status == "done":
            assert numbers == [1, 2, 3, 4]  # none twice
            assert result.weights_hash == whole.weights_hash
        else:
            assert numbers == [1, 2]
            assert result.trials["error"].item().startswith("HostLost: ")
